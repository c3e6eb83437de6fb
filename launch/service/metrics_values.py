"""Families of numbers as prometheus-client wants them, from a table of label values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = Mapping[tuple[str, ...], float]
"""Label values -> number."""


def counter(name: str, about: str, values: Values, *, labels: Sequence[str] = ("model_name",)) -> Metric:
    """What only grows; `_total` is added to the name where it is shown."""
    family = CounterMetricFamily(name, about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def gauge(name: str, about: str, values: Values, *, labels: Sequence[str] = ("model_name",)) -> Metric:
    """What goes up and down."""
    family = GaugeMetricFamily(name, about, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family

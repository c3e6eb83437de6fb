"""Whether the server lives, has started, is ready, and gets things done: four questions, four answers.

Health is progress: a group that has requests and ends no step is not healthy, whatever processes are there; one that
has nothing to do is. Knows the group by `front_client`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from ..front.front_client import GroupClient
from .http_port import Page, Pages
from .metrics import ServiceMetrics

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """How the group is, in a word for programs, and in words."""

    healthy: bool
    ready: bool
    state: str
    words: str


class Wellbeing:
    """Asks the group how it is, and remembers that it once was ready."""

    def __init__(self, client: GroupClient, *, stall_after_s: float) -> None:
        self._client = client
        self._stall_after_s = stall_after_s
        self._started = False

    def now(self) -> Condition:
        """At this moment."""
        health = self._client.health()
        if health.state == "failed":
            words = health.culprit or "a rank has failed"
            return Condition(healthy=False, ready=False, state="failed", words=words)
        if health.state == "starting":
            return Condition(healthy=False, ready=False, state="starting", words="the ranks are starting")
        self._started = True
        busy = sum(load.running + load.waiting for load in self._client.loads())
        age = health.last_step_age_s
        if busy and age is not None and age > self._stall_after_s:
            words = f"no step has ended for {age:.0f} s, and {busy} requests wait for one"
            return Condition(healthy=False, ready=False, state="stalled", words=words)
        return Condition(
            healthy=True,
            ready=health.state == "ready",
            state=health.state,
            words="no requests" if not busy else f"{busy} requests, the last step ended {age or 0.0:.1f} s ago",
        )

    @property
    def started(self) -> bool:
        """Whether the ranks have ever been ready."""
        return self._started or self._client.health().state in ("ready", "draining")


def pages(wellbeing: Wellbeing, metrics: ServiceMetrics) -> Pages:
    """What the HTTP port shows."""
    return {
        "/live": lambda: _page(True, "live", "the front door answers"),
        "/started": lambda: _page(wellbeing.started, "started" if wellbeing.started else "starting", ""),
        "/ready": lambda: _condition_page(wellbeing.now(), of_ready=True),
        "/health": lambda: _condition_page(wellbeing.now(), of_ready=False),
        "/metrics": lambda: Page(body=metrics.text(), content_type=METRICS_TYPE),
    }


def _condition_page(condition: Condition, *, of_ready: bool) -> Page:
    good = condition.ready if of_ready else condition.healthy
    return _page(good, condition.state, condition.words)


def _page(good: bool, state: str, words: str) -> Page:
    body = json.dumps({"state": state, "words": words}) + "\n"
    return Page(status=200 if good else 503, body=body.encode(), content_type="application/json")

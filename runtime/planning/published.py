"""What others have published, held against the cost model: one number is fitted, what deployments reach of it.

    efficiency = geometric mean of published over modelled tokens/s
    left out   = the same over all but one, times what the model says of that one: what it would have been told

Reads profiles/results/published.toml; the model knows kernels and exchanges of a level step, and a deployment has
schedulers, stragglers and gaps as well. Knows no files of devices and models: they are handed in.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ..costs.costs import StepCosts, StepShape
from ..costs.device_costs import DeviceCosts, Group
from ..costs.loads import level_imbalance
from ..costs.roofline import CostShape

LOADS = ("balanced", "moved")
Known = Callable[["Deployment"], tuple[DeviceCosts, CostShape]]
"""What is known of a deployment's device and model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployment:
    """One published figure; tokens a second and GPU. What the fields mean is said on top of the file."""

    name: str
    source: str
    device: str
    model: str
    ranks: int
    tokens_per_s: float
    redundant: int = 0
    context: float = 0.0
    batch: int = 0
    tracks: int = 1
    load: str = "moved"
    not_predicted: str = ""
    misses: str = ""

    def __post_init__(self) -> None:
        if self.load not in LOADS:
            raise ValueError(f"{self.name}: load is {self.load!r}; it must be {' or '.join(LOADS)}, e.g. moved")
        if not self.not_predicted and not (self.batch > 0 and self.context > 0):
            raise ValueError(f"{self.name}: batch and context must be above 0, or not_predicted must say why not")


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A figure and what the others predict for it. `error` is signed: above 0, the prediction is too high."""

    deployment: Deployment
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.deployment.tokens_per_s - 1.0


def read_published(path: Path) -> tuple[tuple[Deployment, ...], float]:
    """The deployments and how near they should lie. ValueError names the file and what is wrong in it."""
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    try:
        return tuple([_deployment(each) for each in data["deployment"]]), float(data["within"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def modelled(deployment: Deployment, known: Known) -> float:
    """Tokens a second and GPU by the cost model alone, with exchanges as published kernels send rows."""
    costs, shape = known(deployment)
    imbalance = _imbalance(deployment, shape)
    group = Group(
        ranks=deployment.ranks,
        redundant=deployment.redundant,
        imbalance=imbalance,
        wire_imbalance=imbalance,
        rows_per="experts",
    )
    step = StepShape(decode_tokens=deployment.batch, context_len=deployment.context)
    took = StepCosts(costs.operations(shape, group)).step_time([step], tracks=deployment.tracks)
    return deployment.batch / took.total_us * 1e6


def fit_efficiency(deployments: Sequence[Deployment], known: Known) -> float:
    """The one number, over all that can be predicted. ValueError where there are none."""
    return _fit(list(_ratios(deployments, known).values()))


def leave_one_out(deployments: Sequence[Deployment], known: Known) -> list[Held]:
    """Each that can be predicted, by the efficiency that all the others have."""
    ratios = _ratios(deployments, known)
    held = []
    for deployment in deployments:
        if deployment.name in ratios:
            others = [ratio for name, ratio in ratios.items() if name != deployment.name]
            alone = deployment.tokens_per_s / ratios[deployment.name]
            held.append(Held(deployment=deployment, predicted=_fit(others) * alone))
    return held


def _ratios(deployments: Sequence[Deployment], known: Known) -> dict[str, float]:
    return {each.name: each.tokens_per_s / modelled(each, known) for each in deployments if not each.not_predicted}


def _fit(ratios: Sequence[float]) -> float:
    if not ratios:
        raise ValueError("there is no published figure that can be predicted, so nothing to fit an efficiency to")
    return math.exp(math.fsum([math.log(ratio) for ratio in ratios]) / len(ratios))


def _imbalance(deployment: Deployment, shape: CostShape) -> float:
    if deployment.load == "balanced":
        return 1.0
    return level_imbalance(
        ranks=deployment.ranks,
        experts=shape.experts,
        redundant=deployment.redundant,
        top_k=shape.top_k,
        tokens=deployment.batch,
    )


def _deployment(data: dict[str, Any]) -> Deployment:
    names = [field.name for field in fields(Deployment)]
    for name in data:
        if name not in names:
            raise ValueError(f"{data.get('name')}: {name} is unknown; the fields are {', '.join(names)}")
    return Deployment(**data)

"""A real worker with a full house of requests, around a model that does nothing.

For whoever measures what a step costs besides the model. The worker, its scheduler, its sampler and its control plane
are the engine's own and unchanged; the model's logits are fixed. Knows no clock.

Shapes: B sampled positions, V vocabulary, L MoE layers, E experts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ep import Pending, ThreadGroup
from eplb import ExpertLoad

from ..control.control import Control
from ..failure.recorder import Recorder
from ..failure.straggler import StragglerState
from ..forward.batch import RequestTable
from ..forward.decoder import Decoder, DecoderOutput, TrackInput
from ..forward.experts import Experts
from ..loop.ranks import Tray
from ..loop.worker import Worker
from ..requests.outputs import News
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from ..requests.request import Request
from ..requests.sampling_params import SamplingParams
from ..scheduling.cadence import CadenceConfig
from ..scheduling.heartbeat import HeartbeatState
from ..scheduling.scheduler import Scheduler, SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much there is to do. The model's numbers are DeepSeek-V3's; the vocabulary is small, for its size costs the
    device and not the host."""

    requests: int = 256
    prompt_len: int = 1024
    """On average; prompts differ, so that their pages do not all fill up in the same step."""
    steps: int = 200
    temperature: float = 0.0
    async_depth: int = 1
    page_size: int = 64
    moe_layers: int = 58
    experts: int = 256
    vocab: int = 64

    def __post_init__(self) -> None:
        for name in ("requests", "prompt_len", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1, e.g. 200")
        SamplingParams(temperature=self.temperature)  # it refuses what is out of range


def full_house(control: Control, load: Load, *, recorder: Recorder, emit: Callable[[Sequence[News]], None]) -> Worker:
    """A worker whose requests all decode from its next step on; called on all ranks at the same time."""
    requests = _requests(load)
    worker = _worker(control, load, recorder, emit)
    for request in requests:
        worker.scheduler.add(request)
    with torch.inference_mode():
        while any(request.num_output < 2 for request in requests):
            worker.step()
    return worker


class _FixedModel:
    """Stands where the decoder stands: the same logits in every step, and every expert gets its share."""

    def __init__(self, load: Load) -> None:
        generator = torch.Generator().manual_seed(0)
        self._logits_BV = torch.randn(load.requests, load.vocab, generator=generator)
        self._counts_LE = torch.ones(load.moe_layers, load.experts, dtype=torch.int64)

    def stages(self, batch: TrackInput) -> Generator[Pending[Any] | None, Any, DecoderOutput]:
        """See `Decoder.stages`."""
        yield from ()
        return DecoderOutput(hidden_BD=self._logits_BV[: len(batch.logit_rows_B)], counts_LE=self._counts_LE)

    def logits(self, hidden_BD: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return hidden_BD

    def check_faults(self) -> None:
        """Nothing is exchanged."""


def _requests(load: Load) -> list[Request]:
    """The same on every rank, so that all ranks fill up in the same steps; none ends while it is measured."""
    numbers = random.Random(0)
    params = SamplingParams(temperature=load.temperature, max_tokens=_longest_output(load))
    low = load.prompt_len - load.prompt_len // 8
    return [
        Request(
            id=f"request-{index}",
            prompt=tuple(numbers.choices(range(load.vocab), k=numbers.randint(low, 2 * load.prompt_len - low))),
            params=params,
            arrival=index,
            seed=index,
            stop_ids=frozenset({load.vocab}),  # as everywhere there is one; the fixed logits never choose it
        )
        for index in range(load.requests)
    ]


def _longest_output(load: Load) -> int:
    # The first request decodes while the last one's prompt waits; each step of that time computes at least one request.
    return load.steps + 2 * load.requests + 16


def _worker(control: Control, load: Load, recorder: Recorder, emit: Callable[[Sequence[News]], None]) -> Worker:
    longest = 2 * load.prompt_len + _longest_output(load)
    config = SchedulerConfig(
        max_num_seqs=load.requests, max_model_len=longest, max_num_batched_tokens=load.requests + 8192
    )
    # One more than the longest request needs: the scheduler admits nobody into the last pages.
    pool = PagePool(load.requests * (2 + longest // load.page_size), load.page_size)
    prefix = PrefixCache(pool)
    device = torch.device("cpu")
    return Worker(
        decoder=cast(Decoder, _FixedModel(load)),  # the worker asks for stages() and logits() only
        scheduler=Scheduler(config, pool, prefix),
        pool=pool,
        prefix=prefix,
        table=RequestTable(load.requests, longest, page_size=load.page_size, device=device),
        transport=ThreadGroup(control.size).transports[control.rank],  # to say who this is: nothing is exchanged
        control=control,
        recorder=recorder,
        state=HeartbeatState.start(CadenceConfig()),
        stragglers=StragglerState(),
        async_depth=load.async_depth,
        config_hash=0,
        experts=Experts(ExpertLoad(load.moe_layers, load.experts, device=device)),
        emit=emit,
        notify=lambda _: None,
        inbox=Tray(),
    )

"""What a model's operations take on one core of this machine, piece by piece: the `[rates]` of its hardware file.

    product, expert, core    the engine's own operations, alone, on weights and latents that fit in no cache
    layer, host              decode steps of a small model in two depths: what a layer more takes, less its operations,
                             and what a step takes besides its layers

Time is the process's CPU time, so set one thread; of several tries the median. All run in turns, so that a disturbance
falls on all.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from attention_mla import (
    CacheFormat,
    LatentCache,
    MlaConfig,
    MlaWeights,
    PagedView,
    PageTable,
    Spans,
    attention_ops,
    mla_shapes,
)
from attention_mla.reference import Queries
from ep import Arrivals
from ep.combine import Journey
from ep.rows import RunCodec
from moe import ExpertBank, moe_ops

from ..costs.costs import StepCosts, StepShape, StepTime
from ..costs.curves import Curve
from ..costs.rates import RatedOperations, Rates
from ..costs.roofline import CostShape, RooflineOperations
from ..engine import Engine
from ..model.model_config import ModelConfig, read_model_config
from ..requests.sampling_params import SamplingParams
from ..scheduling.scheduler import SchedulerConfig
from ..settings.config import CacheConfig, EngineConfig
from ..settings.kernel_choice import choose_ops
from ..weights.hardware import Hardware

_MILLION = 1e6
_TAIL = 0.2
"""Of a measured time, at least this much is its own, whatever is taken off."""

SMALL = {
    "model_type": "deepseek_v3", "hidden_size": 512, "intermediate_size": 512, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "v_head_dim": 128, "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_intermediate_size": 128,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 512,
}  # fmt: skip
"""A small model that still fits in no cache: what its calls find there is what those of a large one find."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RateSizes:
    """How much is measured. Weights together are several times a cache.

    depths   layers of the small model; prompts and outputs (few, many) of its requests
    """

    tokens: tuple[int, ...] = (1, 4, 16, 64, 256)
    product: tuple[int, int] = (2048, 1024)
    num_products: int = 16
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 64)
    expert: tuple[int, int] = (2048, 704)
    num_experts: int = 16
    contexts: tuple[int, ...] = (64, 512, 2048)
    heads: int = 16
    requests: int = 8
    decode_tokens: tuple[int, ...] = (1, 8, 32, 64)
    depths: tuple[int, int] = (2, 6)
    prompt_len: int = 16
    outputs: tuple[int, int] = (3, 19)
    tries: int = 3


def measure_rates(hardware: Hardware, sizes: RateSizes) -> Rates:
    """All of them; the caller has set one thread. Some twenty seconds of a core with the usual sizes."""
    assert torch.get_num_threads() == 1, f"{torch.get_num_threads()} threads; CPU time would count each of them"
    with torch.inference_mode():
        product_us = _product_curve(sizes)
        call_us, expert_us = _expert_curve(sizes)
        core_us = _core_curve(sizes, product_us)
    nothing = Curve((1.0,), (0.0,))
    rates = Rates(
        product_us=product_us, expert_us=expert_us, expert_call_us=call_us, core_us=core_us, layer_us=nothing,
        host_us=nothing,
    )  # fmt: skip
    layer_us, host_us = _rest_curves(rates, hardware, sizes)
    return replace(rates, layer_us=layer_us, host_us=host_us)


class Checked(NamedTuple):
    """A decode step of so many requests: measured, and predicted part by part; microseconds."""

    tokens: int
    measured_us: float
    predicted: StepTime

    @property
    def error(self) -> float:
        """Predicted over measured, less 1: below 0, the model is too fast."""
        return self.predicted.total_us / self.measured_us - 1.0


def check_rates(config: Path, rates: Rates, hardware: Hardware, sizes: RateSizes) -> list[Checked]:
    """Decode steps of a model with random weights on one rank, beside what `rates` say of them."""
    steps_us = _decode_steps(config, sizes)
    operations = _operations(rates, hardware, read_model_config(config))
    costs, context = StepCosts(operations), sizes.prompt_len + sum(sizes.outputs) / 2
    return [
        Checked(tokens, us, costs.step_time([StepShape(decode_tokens=tokens, context_len=context)]))
        for tokens, us in zip(sizes.decode_tokens, steps_us, strict=True)
    ]


def _operations(rates: Rates, hardware: Hardware, model: ModelConfig) -> RatedOperations:
    bound = RooflineOperations(shape=CostShape.of(model), hardware=hardware, ranks=1)
    return RatedOperations(rates=rates, bound=bound)


def _product_curve(sizes: RateSizes) -> Curve:
    outputs, inputs = sizes.product
    weights = [torch.full((outputs, inputs), 0.01, dtype=torch.bfloat16) for _ in range(sizes.num_products)]
    millions = sizes.num_products * outputs * inputs / _MILLION

    ops = attention_ops(_usual_ops())

    def work(tokens: int) -> Callable[[], object]:
        x_TD = torch.ones(tokens, inputs, dtype=torch.bfloat16)
        return lambda: [ops.linear(x_TD, weight) for weight in weights]

    taken = _in_turns([work(tokens) for tokens in sizes.tokens], tries=sizes.tries)
    return _curve(sizes.tokens, [us / millions for us in taken])


def _expert_curve(sizes: RateSizes) -> tuple[float, Curve]:
    """What a call takes for each expert, and the rest for a million parameters, over rows of each."""
    large, small = (_bank(sizes.num_experts, *shape) for shape in (sizes.expert, (64, 32)))
    works = [_experts_work(small, 4), *[_experts_work(large, rows) for rows in sizes.rows]]
    small_us, *taken = [us / sizes.num_experts for us in _in_turns(works, tries=sizes.tries)]
    millions = 3 * sizes.expert[0] * sizes.expert[1] / _MILLION
    return small_us, _curve(sizes.rows, [max(us - small_us, _TAIL * us) / millions for us in taken])


def _bank(num_experts: int, hidden: int, width: int) -> ExpertBank:
    return ExpertBank(
        gate_up_L2FD=torch.full((num_experts, 2 * width, hidden), 0.01, dtype=torch.bfloat16),
        down_LDF=torch.full((num_experts, hidden, width), 0.01, dtype=torch.bfloat16),
    )


def _experts_work(bank: ExpertBank, rows: int) -> Callable[[], object]:
    number, codec = rows * bank.num_slots, RunCodec(bank.gate_up_L2FD.shape[2], torch.bfloat16)
    x_ND = torch.ones(number, codec.hidden, dtype=torch.bfloat16)
    slots_N1, source_N = (torch.arange(number) % bank.num_slots).unsqueeze(1), torch.zeros(number, dtype=torch.int64)
    weights_N1 = torch.ones(number, 1)
    journey = Journey((), weights_N1, weights_N1)
    ops = moe_ops(_usual_ops())

    def work() -> object:
        arrivals = Arrivals(codec, codec.encode(x_ND, torch.bfloat16), slots_N1, weights_N1, source_N, journey)
        return ops.experts(arrivals, bank, rows_per_slot=rows)

    return work


def _core_curve(sizes: RateSizes, product_us: Curve) -> Curve:
    """One token's attention beside the two products around it, which are counted as products."""
    works = [_core_work(sizes, context) for context in sizes.contexts]
    absorbed = 512 * sizes.heads * 256 / _MILLION
    around_us = absorbed * product_us.at(sizes.requests)
    millions = sizes.requests * sizes.heads * (2 * 512 + 64) / _MILLION
    taken = _in_turns(works, tries=sizes.tries)
    return _curve((0, *sizes.contexts), [0.0, *[max(us - around_us, _TAIL * us) / millions for us in taken]])


def _core_work(sizes: RateSizes, context: int) -> Callable[[], object]:
    config = read_small_config(sizes.depths[0]).mla
    config = replace(config, num_heads=sizes.heads)
    page, requests = 64, sizes.requests
    pages = -(-context // page)
    cache = LatentCache(1, requests * pages, page, CacheFormat.of(config, torch.bfloat16))
    cache.pages.zero_()
    table = PageTable(requests, pages, page_size=page)
    for slot in range(requests):
        table.write(slot, 0, range(slot * pages, (slot + 1) * pages))
    ones_B = np.ones(requests, dtype=np.int64)
    spans = Spans(
        slots_B=np.arange(requests), num_tokens_B=ones_B, context_B=context * ones_B, written_B=(context - 1) * ones_B
    )
    view, ops = PagedView.build(spans, table), attention_ops(_usual_ops())
    plan = ops.plan(view, config=config, dtype=torch.bfloat16)
    queries = Queries(nope_THN=_full(requests, sizes.heads, 128), rope_THP=_full(requests, sizes.heads, 64))
    weights, out_THV = _mla_weights(config), _full(requests, sizes.heads, 128)
    return lambda: ops.attend(
        queries, weights, plan=plan, config=config, cache=cache, layer=0, view=view, out_THV=out_THV
    )


def _usual_ops() -> str:
    """What an engine computes with here, in the format that is measured."""
    return choose_ops("auto", device=torch.device("cpu"), dtype=torch.bfloat16, page_size=CacheConfig().block_size)


def _full(*shape: int) -> torch.Tensor:
    return torch.full(shape, 0.01, dtype=torch.bfloat16)


def _mla_weights(config: MlaConfig) -> MlaWeights:
    shapes = mla_shapes(config)
    return MlaWeights.build(config, {name: _full(*shape) for name, shape in shapes.items()})


def _rest_curves(rates: Rates, hardware: Hardware, sizes: RateSizes) -> tuple[Curve, Curve]:
    """What is left of a layer, and of a step, when the operations by `rates` are taken off."""
    shallow, deep = sizes.depths
    with tempfile.TemporaryDirectory() as folder:
        steps_us = {depth: _decode_steps(_write_small(Path(folder), depth), sizes) for depth in sizes.depths}
    operations = _operations(rates, hardware, read_small_config(shallow))
    layers, hosts = [], []
    for place, tokens in enumerate(sizes.decode_tokens):
        step = StepShape(decode_tokens=tokens, context_len=sizes.prompt_len + sum(sizes.outputs) / 2)
        attention_us = operations.attention_us(tokens, step.context_len)
        moe_us = attention_us + operations.experts_us(tokens, mean_tokens=tokens)
        low_us, high_us = steps_us[shallow][place], steps_us[deep][place]
        layer_us = (high_us - low_us) / (deep - shallow)
        layers.append(max(layer_us - moe_us, _TAIL * layer_us))
        rated_us = shallow * layers[-1] + moe_us * (shallow - 1) + attention_us + operations.dense_us(tokens)
        hosts.append(max(low_us - rated_us - operations.frame.head_at(tokens), _TAIL * low_us / shallow))
    return _curve(sizes.decode_tokens, layers), _curve(sizes.decode_tokens, hosts)


def read_small_config(depth: int) -> ModelConfig:
    """The small model with so many layers."""
    with tempfile.TemporaryDirectory() as folder:
        return read_model_config(_write_small(Path(folder), depth))


def _write_small(folder: Path, depth: int) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(SMALL | {"num_hidden_layers": depth}), encoding="utf-8")
    return path


def _decode_steps(path: Path, sizes: RateSizes) -> list[float]:
    """Microseconds of CPU time that a decode step of each number of requests takes."""
    few, many = sizes.outputs
    pages = -(-(sizes.prompt_len + many) // CacheConfig().block_size)
    config = EngineConfig(
        model=str(path),
        load_format="dummy",
        dtype="bfloat16",
        cache=CacheConfig(num_blocks=(1 + pages) * max(sizes.decode_tokens)),
        scheduler=SchedulerConfig(max_num_seqs=max(sizes.decode_tokens), enable_prefix_caching=False),
    )
    taken = []
    with Engine(config) as engine:
        for tokens in sizes.decode_tokens:
            _decode(engine, tokens, sizes, outputs=few)
            tried = [
                _decode(engine, tokens, sizes, outputs=many) - _decode(engine, tokens, sizes, outputs=few)
                for _ in range(sizes.tries)
            ]
            taken.append(max(statistics.median(tried), 1.0) / (many - few))
    return taken


def _decode(engine: Engine, tokens: int, sizes: RateSizes, *, outputs: int) -> float:
    """Microseconds of CPU time that so many requests take, prompts included."""
    params = SamplingParams(temperature=0.0, max_tokens=outputs, ignore_eos=True)
    prompts = [[1 + (place + number) % 500 for number in range(sizes.prompt_len)] for place in range(tokens)]
    begin = time.process_time_ns()
    engine.generate(prompts, params)
    return (time.process_time_ns() - begin) / 1e3


def _in_turns(works: Sequence[Callable[[], object]], *, tries: int) -> list[float]:
    """Microseconds of CPU time of each, the median of tries."""
    for work in works:
        work()
    taken: list[list[int]] = [[] for _ in works]
    for _ in range(tries):
        for place, work in enumerate(works):
            begin = time.process_time_ns()
            work()
            taken[place].append(time.process_time_ns() - begin)
    return [statistics.median(each) / 1e3 for each in taken]


def _curve(xs: Sequence[float], ys: Sequence[float]) -> Curve:
    """Times never fall as work grows; where they were measured to, noise did it."""
    return Curve(tuple(xs), tuple(accumulate(ys, max)))

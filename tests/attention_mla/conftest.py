"""For these tests: a small model on one rank, transformers as the oracle, a comparison that shows its worst place."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.glm4_moe_lite import modeling_glm4_moe_lite as glm

from attention_mla import (
    CacheFormat,
    LatentCache,
    MlaConfig,
    MlaWeights,
    PagedView,
    RopeConfig,
    Tiling,
    YarnScaling,
    angles,
    attend,
    mla_shapes,
)
from attention_mla.ops import REFERENCE, AttentionOps
from tests.attention_mla.spans import Span, view_of

YARN = YarnScaling(factor=4.0, original_max_position=64, mscale=0.7, mscale_all_dim=1.3)
USUAL = Tiling()
SMALL = MlaConfig(
    hidden_size=24,
    num_heads=3,
    q_lora_rank=10,
    kv_lora_rank=12,
    qk_nope_head_dim=7,
    qk_rope_head_dim=6,
    v_head_dim=9,
    rope=RopeConfig(theta=100.0, scaling=YARN),
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


def _assert_near(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Equal within `tolerance` of the largest expected value; the message shows the worst place."""
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"dtype {actual.dtype}, expected {expected.dtype}"
    assert bool(expected.isfinite().all()), "the expectation itself is not finite"
    if actual.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().nan_to_num(nan=float("inf"))
    worst = tuple(int(index) for index in torch.unravel_index(error.argmax(), error.shape))
    allowed = tolerance * max(float(expected.double().abs().max()), 1e-300)
    assert float(error.max()) <= allowed, (
        f"worst at {worst}: {float(actual[worst])!r}, expected {float(expected[worst])!r}, "
        f"off by {float(error[worst]):.3e}, allowed {allowed:.3e}; "
        f"{int((error > allowed).sum())} of {error.numel()} places are off"
    )


@pytest.fixture(scope="session")
def assert_near() -> Callable[[Tensor, Tensor, float], None]:
    return _assert_near


def make_tensors(config: MlaConfig, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in mla_shapes(config).items():
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        tensors[name] = (1.0 + 0.2 * values if len(shape) == 1 else values / shape[-1] ** 0.5).to(dtype)
    return tensors


def hidden_states(num_tokens: int, config: MlaConfig, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.randn(num_tokens, config.hidden_size, generator=generator, dtype=torch.float64).to(dtype)


def shuffled_pages(count: int, num_pages: int, seed: int) -> list[int]:
    return torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed))[:count].tolist()


@dataclass
class Rank:
    """One layer, one cache: runs steps of (request, number of tokens) and gives each request's outputs in order.

    Request r owns a shuffled set of pages that no other request has.
    """

    config: MlaConfig
    page_size: int
    tiling: Tiling
    max_absorbed_tokens: int
    inputs: Sequence[Tensor]
    weights: MlaWeights
    cache: LatentCache
    pages: list[list[int]]
    done: list[int]
    written: list[int]
    """How far steps have written, also those that were taken back (done set back)."""
    ops: AttentionOps = REFERENCE

    @classmethod
    def build(
        cls,
        inputs: Sequence[Tensor],
        *,
        config: MlaConfig = SMALL,
        page_size: int = 16,
        tiling: Tiling = USUAL,
        max_absorbed_tokens: int = 4,
        poison: float = 0.0,
        fp8: bool = False,
        ops: AttentionOps = REFERENCE,
    ) -> "Rank":
        """`poison` fills the cache beforehand, as if other requests had left it there; an `fp8` one with bytes 0xff,
        which are NaN whatever they are read as."""
        dtype = inputs[0].dtype
        counts = [-(-len(x) // page_size) for x in inputs]
        shuffled = shuffled_pages(sum(counts), sum(counts) + 3, seed=5)
        cache = LatentCache(2, sum(counts) + 3, page_size, CacheFormat.of(config, dtype, fp8=fp8))
        cache.pages.fill_(0xFF if fp8 else poison)
        firsts = [sum(counts[:index]) for index in range(len(counts))]
        return cls(
            config=config,
            page_size=page_size,
            tiling=tiling,
            max_absorbed_tokens=max_absorbed_tokens,
            inputs=inputs,
            weights=MlaWeights.build(config, make_tensors(config, dtype)),
            cache=cache,
            pages=[shuffled[first : first + count] for first, count in zip(firsts, counts, strict=True)],
            done=[0] * len(inputs),
            written=[0] * len(inputs),
            ops=ops,
        )

    def view(self, step: Sequence[tuple[int, int]]) -> PagedView:
        spans = [
            Span(count, self.done[request] + count, self.pages[request], written=self.written[request])
            for request, count in step
        ]
        return view_of(
            spans, page_size=self.page_size, max_absorbed_tokens=self.max_absorbed_tokens, tiling=self.tiling
        )

    def step(self, step: Sequence[tuple[int, int]]) -> list[Tensor]:
        view = self.view(step)
        pieces = [self.inputs[request][self.done[request] : self.done[request] + count] for request, count in step]
        x_TD = torch.cat(pieces) if pieces else self.inputs[0][:0]
        rotation = angles(self.config.rope, self.config.qk_rope_head_dim, view.positions_T, x_TD.dtype)
        out_TD = attend(
            x_TD,
            self.weights,
            config=self.config,
            cache=self.cache,
            layer=1,
            view=view,
            rotation=rotation,
            ops=self.ops,
        )
        for request, count in step:
            self.done[request] += count
            self.written[request] = max(self.written[request], self.done[request])
        return list(out_TD.split([count for _, count in step]))

    def run(self, steps: Sequence[Sequence[tuple[int, int]]]) -> list[Tensor]:
        outputs = [[x[:0]] for x in self.inputs]
        for step in steps:
            for (request, _), out in zip(step, self.step(step), strict=True):
                outputs[request].append(out)
        return [torch.cat(pieces) for pieces in outputs]


FAMILIES: dict[str, tuple[Any, Any, Any]] = {
    "deepseek_v2": (DeepseekV2Config, v2.DeepseekV2Attention, v2.DeepseekV2RotaryEmbedding),
    "deepseek_v3": (DeepseekV3Config, v3.DeepseekV3Attention, v3.DeepseekV3RotaryEmbedding),
    "glm4_moe_lite": (Glm4MoeLiteConfig, glm.Glm4MoeLiteAttention, glm.Glm4MoeLiteRotaryEmbedding),
}


def rope_parameters(rope: RopeConfig) -> dict[str, Any]:
    """What transformers keeps of a file with this rope; a None of ours is a key that the file lacks."""
    if rope.scaling is None:
        return {"rope_type": "default", "rope_theta": rope.theta}
    keys = asdict(rope.scaling)
    original = keys.pop("original_max_position")
    present = {key: value for key, value in keys.items() if value is not None}
    return {
        "rope_type": "yarn",
        "rope_theta": rope.theta,
        "original_max_position_embeddings": original,
        **present,
    }


def hf_config(family: str, config: MlaConfig) -> Any:
    interleaved = {} if family == "deepseek_v2" else {"rope_interleave": config.rope.interleaved}
    built = FAMILIES[family][0](
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        max_position_embeddings=8192,
        rms_norm_eps=1e-2,  # reaches no latent norm
        rope_parameters=rope_parameters(config.rope),
        **interleaved,
    )
    built._attn_implementation = "eager"
    return built


def build_oracle(family: str, config: MlaConfig) -> nn.Module:
    return FAMILIES[family][1](hf_config(family, config), layer_idx=0)


def oracle_output(family: str, config: MlaConfig, tensors: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """What transformers' attention makes of one request that is computed whole, in x's dtype."""
    attention = build_oracle(family, config).to(x_TD.dtype)
    attention.load_state_dict(tensors)
    rotary = FAMILIES[family][2](hf_config(family, config))
    num_tokens = x_TD.shape[0]
    future = torch.full((num_tokens, num_tokens), float("-inf"), dtype=x_TD.dtype).triu(1)
    x_1TD = x_TD.unsqueeze(0)
    turns = rotary(x_1TD, torch.arange(num_tokens).unsqueeze(0))
    out, _ = attention(hidden_states=x_1TD, position_embeddings=turns, attention_mask=future[None, None])
    return out.squeeze(0)


@pytest.fixture(scope="session")
def oracle() -> Callable[..., nn.Module]:
    """oracle(family, config): transformers' attention module, freshly initialised."""
    return build_oracle


@pytest.fixture(scope="session")
def expected_of() -> Callable[..., Tensor]:
    """expected_of(family, config, tensors, x_TD)"""
    return oracle_output


@pytest.fixture(scope="session")
def rope_keys() -> Callable[[RopeConfig], dict[str, Any]]:
    return rope_parameters


@pytest.fixture(scope="session")
def small_config() -> MlaConfig:
    return SMALL


@pytest.fixture(scope="session")
def make_config() -> Callable[..., MlaConfig]:
    """The small config with some fields replaced."""
    return lambda **changes: replace(SMALL, **changes)


@pytest.fixture(scope="session")
def rank_of() -> Callable[..., Rank]:
    return Rank.build


@pytest.fixture(scope="session")
def tensors_of() -> Callable[..., dict[str, Tensor]]:
    return make_tensors


@pytest.fixture(scope="session")
def hidden() -> Callable[..., Tensor]:
    """hidden(num_tokens, dtype=..., seed=..., config=...)"""

    def build(num_tokens: int, *, seed: int = 0, dtype: torch.dtype = torch.float64, config: Any = SMALL) -> Tensor:
        return hidden_states(num_tokens, config, dtype, seed)

    return build

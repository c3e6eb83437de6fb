"""Numba's kernels against the same sums in float64, and a whole block against the one in torch, to the bit where mates
and threads must not count."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import CacheFormat, LatentCache, MlaConfig, Queries, angles, attention_ops, numba_ops, rotate
from attention_mla.config import RopeConfig
from attention_mla.latent_rows import Latents
from attention_mla.numba_ops import SHORT, NumbaOps
from attention_mla.weights import MlaWeights, mla_shapes
from tests.attention_mla.spans import Span, view_of

STEPS = [[(0, 20), (1, 3)], [(0, 1), (1, 2), (2, 1)], [(2, 6)], [(0, 1), (2, 1)]]
LONG = [[(0, SHORT + 5), (1, 3)], [(0, 1), (1, SHORT + 9), (2, 1)], [(2, 6), (0, SHORT + 1)], [(0, 1), (2, 1)]]
"""Prompts that are rows, and prompts that are not."""


@pytest.fixture
def two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found: Tensor, truth: Tensor, steps: int = 1) -> None:
    """Within so many roundings to 8 bits of the largest value."""
    assert found.dtype == torch.bfloat16
    assert found.shape == truth.shape
    assert bool(found.isfinite().all())
    assert float((found.double() - truth).abs().max()) <= steps * 2**-8 * float(truth.abs().max())


@pytest.mark.parametrize("num_tokens", [0, 1, 5, 33])
def test_rows_may_be_columns_of_something_wider(num_tokens: int):
    x_TD, weight_ND = drawn(num_tokens, 60)[:, 13:53], drawn(70, 40, seed=1)
    found = NumbaOps().linear(x_TD, weight_ND)
    assert found.shape == (num_tokens, 70)
    if num_tokens:
        assert_rounded(found, x_TD.double() @ weight_ND.double().T)


def test_each_weight_is_packed_once_and_none_is_taken_for_another():
    ops, x_TD = NumbaOps(), drawn(3, 40)
    weights = [drawn(70, 40, seed=seed) for seed in range(3)]
    first = [ops.linear(x_TD, weight_ND) for weight_ND in weights]
    kept = [weight_ND.clone() for weight_ND in weights]
    for weight_ND in weights:
        weight_ND.zero_()  # what is multiplied from now on is the copy
    for found, again, weight_ND in zip(first, [ops.linear(x_TD, each) for each in weights], kept, strict=True):
        assert torch.equal(found, again)
        assert_rounded(found, x_TD.double() @ weight_ND.double().T)


@pytest.mark.parametrize("size", [1, 7, 24, 129, 1024])
@pytest.mark.parametrize("num_tokens", [0, 1, 9])
def test_norms_are_those_of_torch(size: int, num_tokens: int, two_threads: None):
    wide_TD, update_TD = drawn(num_tokens, size + 6), drawn(num_tokens, size, seed=1)
    x_TD, weight_D = wide_TD[:, 3 : size + 3], drawn(size, seed=2)
    numba, torch_ops = (attention_ops(name) for name in ("numba", "reference"))
    for update in (None, update_TD):
        sum_TD, h_TD = numba.add_norm(x_TD, update, weight_D, 1e-5)
        wanted_sum_TD, wanted_TD = torch_ops.add_norm(x_TD, update, weight_D, 1e-5)
        assert torch.equal(sum_TD, wanted_sum_TD)
        # The sum of squares may differ in its last bit, and move a value that lies between two roundings.
        torch.testing.assert_close(h_TD, wanted_TD, rtol=2**-7, atol=0.0)
    assert torch.equal(numba.norm(x_TD, weight_D, 1e-5), numba.add_norm(x_TD, None, weight_D, 1e-5)[1])


@pytest.mark.parametrize("interleaved", [True, False])
def test_what_is_appended_is_what_torch_appends(
    interleaved: bool, make_config: Callable[..., MlaConfig], two_threads: None
):
    config = make_config(rope=RopeConfig(theta=100.0, interleaved=interleaved), qk_rope_head_dim=10)
    spans = [Span(9, 21, [3, 1], written=27), Span(2, 2, [0]), Span(1, 40, [2, 5, 4])]
    view = view_of(spans, page_size=16)
    rotation = angles(config.rope, 10, view.positions_T, torch.bfloat16)
    down_TX, rope_THP = drawn(12, 5 + config.latent_width), drawn(12, 3, 14, seed=1)[..., 3:13]
    latents = Latents(latent_TC=down_TX[:, 5:-10], rope_TP=down_TX[:, -10:])
    found, wanted = [], []
    for results, name in ((found, "numba"), (wanted, "reference")):
        cache = LatentCache(2, 6, 16, CacheFormat.of(config, torch.bfloat16))
        cache.pages.fill_(7.0)
        shared: dict[str, Any] = {"config": config, "rotation": rotation, "cache": cache, "layer": 1, "view": view}
        results += [attention_ops(name).append(latents, rope_THP, drawn(12, seed=2), **shared), cache.pages]
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7, atol=0.0)
    assert int((found[1] == 0).sum()) >= 16 * config.latent_width  # a page begun is cleared but for its tokens


def test_rows_of_nobody_are_turned_and_written_nowhere(make_config: Callable[..., MlaConfig]):
    config = make_config()
    view = view_of([Span(3, 3, [1])], page_size=4)
    view.places_T[1] = -1
    cache = LatentCache(1, 2, 4, CacheFormat.of(config, torch.bfloat16))
    cache.pages.fill_(7.0)
    rotation = angles(config.rope, 6, view.positions_T, torch.bfloat16)
    down_TX, rope_THP = drawn(3, config.latent_width), drawn(3, 3, 6, seed=1)
    turned_THP = NumbaOps().append(
        Latents(latent_TC=down_TX[:, :-6], rope_TP=down_TX[:, -6:]),
        rope_THP,
        drawn(12, seed=2),
        config=config,
        rotation=rotation,
        cache=cache,
        layer=0,
        view=view,
    )
    torch.testing.assert_close(turned_THP, rotate(rope_THP, rotation, interleaved=True), rtol=2**-7, atol=0.0)
    assert bool((cache.pages[0, 0] == 7.0).all())
    written_4 = (cache.pages[0, 1] != 0).any(dim=1).tolist()
    assert written_4 == [True, False, True, False]


SIZES: list[Any] = [
    pytest.param({}, id="odd"),
    pytest.param({"num_heads": 1, "kv_lora_rank": 1, "qk_rope_head_dim": 2}, id="smallest"),
    pytest.param({"num_heads": 8, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 16}, id="even"),
    pytest.param({"num_heads": 2, "kv_lora_rank": 26, "qk_rope_head_dim": 6}, id="a-vector-wide"),
    pytest.param({"num_heads": 13, "kv_lora_rank": 70, "qk_rope_head_dim": 26, "v_head_dim": 33}, id="whole-width"),
]


@pytest.mark.parametrize("changes", SIZES)
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_rows_attend_as_in_float64(
    changes: dict[str, int], page_size: int, make_config: Callable[..., MlaConfig], two_threads: None
):
    config = make_config(**changes)
    step = Step(config, [1, 2, 63, 64, 65, 130, 300], page_size=page_size)
    assert_rounded(step.attend(step.spans), step.truth(), steps=4)


def test_what_a_row_gets_depends_on_nobody_else(make_config: Callable[..., MlaConfig], two_threads: None):
    config = make_config(num_heads=8, kv_lora_rank=64, qk_rope_head_dim=32, v_head_dim=16)
    step = Step(config, [1, 2, 63, 64, 65, 130, 300], page_size=16)
    together = step.attend(step.spans)
    backwards = step.attend(step.spans[::-1])
    assert torch.equal(backwards.flip(0), together)
    for index, span in enumerate(step.spans):
        for threads in (1, 2):
            torch.set_num_threads(threads)
            assert torch.equal(step.attend([span])[0], together[index])


def test_latents_past_a_row_are_not_read(make_config: Callable[..., MlaConfig]):
    step = Step(make_config(), [5, 70], page_size=16)
    wanted = step.attend(step.spans)
    for span in step.spans:
        step.cache.rows(0).stored_NX[step.place(span, span.context_len)] = torch.inf
    assert torch.equal(step.attend(step.spans), wanted)


class Step:
    """Decode rows of these contexts over a cache full of NaN but for them."""

    def __init__(self, config: MlaConfig, contexts: Sequence[int], *, page_size: int) -> None:
        self.config, self.page_size = config, page_size
        counts = [context // page_size + 1 for context in contexts]
        pages = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(3)).tolist()
        self.spans = [
            Span(1, context, pages[sum(counts[:index]) :][:count])
            for index, (context, count) in enumerate(zip(contexts, counts, strict=True))
        ]
        self.cache = LatentCache(1, sum(counts), page_size, CacheFormat.of(config, torch.bfloat16))
        self.cache.pages.fill_(torch.nan)
        for index, span in enumerate(self.spans):
            places = torch.tensor([self.place(span, position) for position in range(span.context_len)])
            self.cache.append(0, 2 * drawn(len(places), config.latent_width, seed=index), places)
        self.queries = {
            span.context_len: (
                drawn(config.num_heads, config.qk_nope_head_dim, seed=100 + index),
                drawn(config.num_heads, config.qk_rope_head_dim, seed=200 + index),
            )
            for index, span in enumerate(self.spans)
        }
        shapes = mla_shapes(config)
        drawn_each = {name: drawn(*shape, seed=seed) / 4 for seed, (name, shape) in enumerate(shapes.items())}
        self.weights = MlaWeights.build(config, drawn_each)
        self.ops = NumbaOps()

    def place(self, span: Span, position: int) -> int:
        return span.pages[position // self.page_size] * self.page_size + position % self.page_size

    def attend(self, spans: Sequence[Span]) -> Tensor:
        config, view = self.config, view_of(spans, page_size=self.page_size)
        nope, rope = (
            torch.stack(part) for part in zip(*[self.queries[span.context_len] for span in spans], strict=True)
        )
        out_THV = torch.full((len(spans), config.num_heads, config.v_head_dim), torch.nan, dtype=torch.bfloat16)
        self.ops.attend(
            Queries(nope_THN=nope, rope_THP=rope),
            self.weights,
            plan=self.ops.plan(view, config=config, dtype=torch.bfloat16),
            config=config,
            cache=self.cache,
            layer=0,
            view=view,
            out_THV=out_THV,
        )
        return out_THV

    def truth(self) -> Tensor:
        """In float64, with keys and values of every head."""
        config, rows = self.config, []
        for span in self.spans:
            nope_HN, rope_HP = (part.double() for part in self.queries[span.context_len])
            places = [self.place(span, position) for position in range(span.context_len)]
            latents_SW = self.cache.rows(0).stored_NX[places].double()
            latent_SC, rope_SP = latents_SW[:, : config.kv_lora_rank], latents_SW[:, config.kv_lora_rank :]
            keys_HSN = torch.einsum("hnc,sc->hsn", self.weights.w_uk_HNC.double(), latent_SC)
            values_HSV = torch.einsum("hvc,sc->hsv", self.weights.w_uv_HVC.double(), latent_SC)
            scores_HS = torch.einsum("hsn,hn->hs", keys_HSN, nope_HN) + rope_HP @ rope_SP.T
            rows.append(torch.einsum("hs,hsv->hv", (scores_HS * config.softmax_scale).softmax(dim=1), values_HSV))
        return torch.stack(rows)


@pytest.mark.parametrize("q_lora_rank", [None, 10])
@pytest.mark.parametrize("steps", [STEPS, LONG], ids=["short", "long"])
@pytest.mark.parametrize("fp8", [False, True])
def test_a_block_is_as_near_the_truth_as_the_one_in_torch(
    q_lora_rank: int | None,
    steps: Any,
    fp8: bool,
    rank_of: Callable[..., Any],
    hidden: Callable[..., Tensor],
    make_config: Callable[..., MlaConfig],
):
    config = make_config(q_lora_rank=q_lora_rank, **({"kv_lora_rank": 128} if fp8 else {}))
    inputs = [hidden(2 * SHORT + 20, seed=seed, dtype=torch.bfloat16, config=config) for seed in range(3)]
    found, plain = (
        torch.cat(
            rank_of(inputs, config=config, poison=float("nan"), fp8=fp8, ops=attention_ops(name)).run(steps)
        ).double()
        for name in ("numba", "reference")
    )
    assert float((found - plain).norm() / plain.norm()) < 2**-6


def test_a_draft_that_was_wrong_is_not_seen(rank_of: Callable[..., Any], hidden: Callable[..., Tensor]):
    inputs = [hidden(40, dtype=torch.bfloat16)]
    straight, taken_back = (rank_of(inputs, poison=float("nan"), ops=attention_ops("numba")) for _ in range(2))
    wanted = straight.run([[(0, 14)], [(0, 1)], [(0, 4)]])[0]
    taken_back.run([[(0, 14)]])
    taken_back.inputs = [torch.cat((inputs[0][:15], torch.full_like(inputs[0][15:], torch.nan)))]
    taken_back.step([(0, 4)])
    taken_back.inputs, taken_back.done = inputs, [14]
    found = torch.cat([taken_back.step([(0, count)])[0] for count in (1, 4)])
    assert torch.equal(found, wanted[14:])


def test_an_idle_rank_attends_to_nothing(rank_of: Callable[..., Any], hidden: Callable[..., Tensor]):
    rank = rank_of([hidden(3, dtype=torch.bfloat16)], ops=attention_ops("numba"))
    assert rank.run([[]])[0].shape == (0, 24)
    assert not rank.cache.pages.any()


def test_places_that_are_written_are_not_cleared_at_the_same_time():
    view = view_of([Span(2, 6, [1, 0], written=7)], page_size=4)
    assert view.places_T.tolist() == [0, 1]
    assert set(view.cleared_alone_J.tolist()) == {2, 3}


def test_rows_may_run_in_parts(make_config: Callable[..., MlaConfig], monkeypatch: pytest.MonkeyPatch):
    step = Step(make_config(), [5, 70, 12, 1, 33], page_size=16)
    wanted = step.attend(step.spans)
    monkeypatch.setattr(numba_ops, "PART_ROWS", 2)
    assert torch.equal(step.attend(step.spans), wanted)

"""The whole block: transformers as the oracle, and everything that must not change a result."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from attention_mla import MlaConfig, RopeConfig, Tiling, YarnScaling, angles, attend, core, project

AssertNear = Callable[[Tensor, Tensor, float], None]
Step = Sequence[tuple[int, int]]


def yarn(mscale: float | None, mscale_all_dim: float | None, factor: float = 4.0) -> YarnScaling:
    return YarnScaling(factor=factor, original_max_position=64, mscale=mscale, mscale_all_dim=mscale_all_dim)


ROPES = [
    pytest.param(RopeConfig(theta=100.0), id="plain"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(0.7, 1.3)), id="unequal-mscales"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(1.0, 1.0)), id="equal-mscales"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(0.7, None)), id="mscale-alone"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(None, 1.3)), id="mscale_all_dim-alone"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(None, None)), id="no-mscales"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(0.0, 0.0)), id="mscales-zero"),
    pytest.param(RopeConfig(theta=100.0, scaling=yarn(1.0, 1.0, factor=1.0)), id="factor-one"),
]
# A chunked prompt, decode rows, a short span that is still absorbed, and the rest in one piece.
UNEVEN = [[(0, 5)], [(0, 1)], [(0, 31)], [(0, 1)], [(0, 4)], [(0, 29)], [(0, 1)]]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_block_is_that_of_transformers(
    family: str,
    rope: RopeConfig,
    make_config: Callable[..., MlaConfig],
    check_against_transformers: Callable[[str, MlaConfig], None],
) -> None:
    check_against_transformers(family, make_config(rope=rope, qk_nope_head_dim=8))  # the V2 class wants an even one


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {"rope": RopeConfig(theta=100.0, interleaved=False, scaling=yarn(0.7, 1.3))}, id="half-split-rope"
        ),
        pytest.param({"q_lora_rank": None}, id="no-query-latent"),
        pytest.param({"qk_nope_head_dim": 8, "v_head_dim": 8}, id="values-as-wide-as-keys"),
        pytest.param({"qk_nope_head_dim": 12, "v_head_dim": 5}, id="values-narrower-than-keys"),
        pytest.param({"num_heads": 1, "hidden_size": 7}, id="one-head"),
        pytest.param({"qk_rope_head_dim": 2, "kv_lora_rank": 1}, id="smallest-latent"),
    ],
)
def test_every_shape_of_block_is_that_of_transformers(
    family: str,
    changes: dict[str, Any],
    make_config: Callable[..., MlaConfig],
    check_against_transformers: Callable[[str, MlaConfig], None],
) -> None:
    check_against_transformers(family, make_config(**changes))


def test_deepseek_v2_without_query_latent_is_that_of_transformers(
    make_config: Callable[..., MlaConfig], check_against_transformers: Callable[[str, MlaConfig], None]
) -> None:
    check_against_transformers("deepseek_v2", make_config(q_lora_rank=None, qk_nope_head_dim=8))


@pytest.fixture
def check_against_transformers(
    rank_of: Callable[..., Any],
    hidden: Callable[..., Tensor],
    tensors_of: Callable[..., dict[str, Tensor]],
    expected_of: Callable[..., Tensor],
    assert_near: AssertNear,
) -> Callable[[str, MlaConfig], None]:
    """72 tokens in uneven pieces, in float32, against one whole pass of transformers' module."""

    def check(family: str, config: MlaConfig) -> None:
        x_TD = hidden(72, dtype=torch.float32, config=config)
        expected = expected_of(family, config, tensors_of(config, torch.float32), x_TD)
        tiling = Tiling(split_tokens=24, context_chunk=40, query_block=16)
        (out,) = rank_of([x_TD], config=config, tiling=tiling).run(UNEVEN)
        assert_near(out, expected, 3e-6)

    return check


def test_bfloat16_stays_near_float32(
    rank_of: Callable[..., Any],
    hidden: Callable[..., Tensor],
    small_config: MlaConfig,
    tensors_of: Callable[..., dict[str, Tensor]],
    expected_of: Callable[..., Tensor],
    assert_near: AssertNear,
) -> None:
    x_TD = hidden(72, dtype=torch.bfloat16)
    tensors = {name: tensor.float() for name, tensor in tensors_of(small_config, torch.bfloat16).items()}
    expected = expected_of("deepseek_v3", small_config, tensors, x_TD.float())
    (out,) = rank_of([x_TD]).run(UNEVEN)
    assert out.dtype is torch.bfloat16
    assert_near(out.float(), expected, 2e-2)


SCHEDULES: list[Any] = [
    pytest.param([[(0, 1)] for _ in range(72)], id="token-by-token"),
    pytest.param([[(0, 4)] for _ in range(18)], id="four-by-four"),
    pytest.param([[(0, 5)], [(0, 67)]], id="five-then-rest"),
    pytest.param([[(0, 63)], [(0, 1)], [(0, 1)], [(0, 7)]], id="up-to-a-page-and-over"),
    pytest.param(UNEVEN, id="uneven"),
]


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("steps", SCHEDULES)
def test_cutting_a_prompt_changes_nothing(
    steps: list[Step],
    page_size: int,
    rank_of: Callable[..., Any],
    hidden: Callable[..., Tensor],
    assert_near: AssertNear,
) -> None:
    x_TD = hidden(72)
    whole, cut = rank_of([x_TD]), rank_of([x_TD], page_size=page_size)
    (expected,), (out,) = whole.run([[(0, 72)]]), cut.run(steps)
    assert_near(out, expected, 1e-12)
    assert_near(latents_of(cut), latents_of(whole), 1e-12)


def latents_of(rank: Any, request: int = 0) -> Tensor:
    """What a request has in the cache [positions, W]."""
    pages_GPW = rank.cache.pages[1, rank.pages[request]]
    return pages_GPW.flatten(0, 1)[: rank.done[request]]


@pytest.mark.parametrize("size", [1, 3, 16, 64, 1000])
def test_tiles_change_nothing(
    size: int, rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: AssertNear
) -> None:
    x_TD = hidden(72)
    (expected,) = rank_of([x_TD]).run([[(0, 72)]])
    for tiling in (
        Tiling(split_tokens=size),
        Tiling(context_chunk=size),
        Tiling(query_block=size),
        Tiling(split_tokens=size, context_chunk=size + 1, query_block=size + 2),
    ):
        (out,) = rank_of([x_TD], tiling=tiling).run(UNEVEN)
        assert_near(out, expected, 1e-12)


def test_prompt_chunks_and_decode_rows_share_a_step(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: AssertNear
) -> None:
    lengths = [70, 33, 1, 17, 130]
    x = [hidden(length, seed=seed) for seed, length in enumerate(lengths)]
    alone = [rank_of([one]).run([[(0, len(one))]])[0] for one in x]
    steps = [
        [(4, 60), (0, 1), (1, 20)],
        [(0, 40), (1, 1), (2, 1), (4, 1), (3, 6)],
        [(1, 11), (4, 64), (3, 3)],
        [(0, 29), (3, 8), (1, 1), (4, 5)],
    ]
    for page_size in (1, 16, 64):
        together = rank_of(x, page_size=page_size, tiling=Tiling(split_tokens=50, context_chunk=48, query_block=7))
        for out, expected in zip(together.run(steps), alone, strict=True):
            assert_near(out, expected, 1e-12)


def test_decode_rows_do_not_depend_on_their_mates(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: AssertNear
) -> None:
    contexts = [1, 63, 64, 65, 257, 1, 700]
    x = [hidden(length, seed=length + seed) for seed, length in enumerate(contexts)]
    prompts: list[Step] = [[(request, length - 1) for request, length in enumerate(contexts) if length > 1]]
    together, reordered, alone = rank_of(x), rank_of(x), rank_of(x)
    for rank in (together, reordered, alone):
        rank.run(prompts)
    expected = [alone.step([(request, 1)])[0] for request in range(len(x))]
    for out, one in zip(together.step([(request, 1) for request in range(len(x))]), expected, strict=True):
        assert_near(out, one, 1e-12)
    backwards = reordered.step([(request, 1) for request in reversed(range(len(x)))])
    for out, one in zip(reversed(backwards), expected, strict=True):
        assert_near(out, one, 1e-12)


def test_broken_request_harms_nobody_else(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: AssertNear
) -> None:
    x = [hidden(40), torch.full_like(hidden(90), float("nan")), hidden(20, seed=2)]
    steps = [[(0, 39), (1, 89), (2, 10)], [(1, 1), (0, 1), (2, 1)], [(2, 9)]]
    alone = [rank_of([one]).run([[(0, len(one))]])[0] for one in x]
    out = rank_of(x).run(steps)
    assert_near(out[0], alone[0], 1e-12)
    assert bool(out[1].isnan().all())
    assert_near(out[2], alone[2], 1e-12)


@pytest.mark.parametrize("max_absorbed_tokens", [0, 1, 1000])
def test_either_form_may_serve_any_span(
    max_absorbed_tokens: int, rank_of: Callable[..., Any], hidden: Callable[..., Tensor], assert_near: AssertNear
) -> None:
    x_TD = hidden(72)
    (expected,) = rank_of([x_TD]).run([[(0, 72)]])
    (out,) = rank_of([x_TD], max_absorbed_tokens=max_absorbed_tokens).run(UNEVEN)
    assert_near(out, expected, 1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_idle_rank_attends_to_nothing(
    dtype: torch.dtype, rank_of: Callable[..., Any], hidden: Callable[..., Tensor], small_config: MlaConfig
) -> None:
    rank = rank_of([hidden(3, dtype=dtype)])
    view = rank.view([])
    rotation = angles(small_config.rope, small_config.qk_rope_head_dim, view.positions_T, dtype)
    out = attend(
        hidden(0, dtype=dtype),
        rank.weights,
        config=small_config,
        cache=rank.cache,
        layer=0,
        view=view,
        rotation=rotation,
    )
    assert (out.shape, out.dtype) == ((0, 24), dtype)
    assert not rank.cache.pages.any()


def test_halves_are_the_whole(rank_of: Callable[..., Any], hidden: Callable[..., Tensor]) -> None:
    x_TD = hidden(9)
    whole, halves = rank_of([x_TD]), rank_of([x_TD])
    (expected,) = whole.run([[(0, 9)]])
    view = halves.view([(0, 9)])
    rotation = angles(halves.config.rope, halves.config.qk_rope_head_dim, view.positions_T, x_TD.dtype)
    shared: dict[str, Any] = {"config": halves.config, "cache": halves.cache, "layer": 1, "view": view}
    queries = project(x_TD, halves.weights, rotation=rotation, **shared)
    assert torch.equal(core(queries, halves.weights, **shared), expected)


def test_layers_keep_their_latents_apart(rank_of: Callable[..., Any], hidden: Callable[..., Tensor]) -> None:
    rank = rank_of([hidden(9)])
    rank.run([[(0, 9)]])
    assert bool(rank.cache.pages[1].any())
    assert not rank.cache.pages[0].any()


def test_hidden_states_of_another_view_are_a_mistake(
    rank_of: Callable[..., Any], hidden: Callable[..., Tensor]
) -> None:
    rank = rank_of([hidden(9)])
    rank.inputs = [hidden(4)]
    with pytest.raises(AssertionError, match="4 hidden states for 9 tokens"):
        rank.step([(0, 9)])

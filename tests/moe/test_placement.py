"""Where experts sit, and which copy a token takes."""

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe import ExpertPlacement, PlacementTable, choose_slots, most_copies, spread


def table_of(*slots: list[int]) -> PlacementTable:
    return PlacementTable.build(slots, device="cpu")


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(1, 1), (5, 3), (32, 4), (32, 5), (64, 64), (384, 7)])
def test_spread_is_even_contiguous_and_complete(num_experts: int, num_ranks: int) -> None:
    placement = spread(num_experts, num_ranks)
    held = [[e for e in placement.experts_of(rank) if e >= 0] for rank in range(num_ranks)]
    sizes = [len(experts) for experts in held]
    assert max(sizes) - min(sizes) <= 1
    assert [expert for experts in held for expert in experts] == list(range(num_experts))
    assert all(len(placement.experts_of(rank)) == placement.slots_per_rank for rank in range(num_ranks))
    assert placement.num_experts == num_experts


def test_spread_as_drawn_in_its_docstring() -> None:
    assert spread(5, 3).slot_experts == (0, 1, 2, 3, 4, -1)


def test_more_ranks_than_experts_are_refused_with_the_largest_number_that_fits() -> None:
    with pytest.raises(ValueError, match=r"num_ranks 40 must be from 1 to 32: .* so 32 would do"):
        spread(32, 40)
    with pytest.raises(ValueError, match=r"num_ranks 0 must be from 1 to 32: .* so 1 would do"):
        spread(32, 0)


@pytest.mark.parametrize(
    ("slot_experts", "message"),
    [
        ((0, 1, 2), "slot_experts has 3 entries, it must have num_ranks 2 x slots_per_rank 2 = 4"),
        ((0, 3, 3, -1), r"leaves out experts \[1, 2\]: every expert needs at least one slot"),
        ((-1, -1, -1, -1), "must hold experts from 0 on, -1 for an empty slot"),
        ((0, 1, -2, 2), "must hold experts from 0 on, -1 for an empty slot"),
    ],
)
def test_a_placement_that_leaves_something_out_is_refused(slot_experts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ExpertPlacement(num_ranks=2, slots_per_rank=2, slot_experts=slot_experts)


@pytest.mark.parametrize(
    ("slot_experts", "message"),
    [
        ((0, 10**12), "leaves out experts [1, 2, 3, 4, 5, 6, 7, 8]: every expert needs at least one slot"),
        ((10**400, 0), "leaves out experts [1, 2, 3, 4, 5, 6, 7, 8]: every expert needs at least one slot"),
        ((*[-2] * 10**6,), "slot_experts holds -2: must hold experts from 0 on, -1 for an empty slot"),
    ],
)
def test_a_placement_of_any_size_is_refused_at_once_and_in_few_words(
    slot_experts: tuple[int, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        ExpertPlacement(num_ranks=1, slots_per_rank=len(slot_experts), slot_experts=slot_experts)
    assert len(str(caught.value)) < 200


@given(st.data())
def test_the_table_turns_the_placement_around(data: st.DataObject) -> None:
    num_ranks, slots_per_rank = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    num_slots = num_ranks * slots_per_rank
    num_experts = data.draw(st.integers(1, num_slots))
    extra = data.draw(st.lists(st.integers(-1, num_experts - 1), min_size=num_slots - num_experts, max_size=num_slots))
    slots = data.draw(st.permutations([*range(num_experts), *extra[: num_slots - num_experts]]))
    placement = ExpertPlacement(num_ranks=num_ranks, slots_per_rank=slots_per_rank, slot_experts=tuple(slots))
    table = placement.table()
    for expert in range(num_experts):
        found = table.slots_EX[expert, : table.copies_E[expert]].tolist()
        assert found == [slot for slot, held in enumerate(slots) if held == expert]
        assert set(table.slots_EX[expert, table.copies_E[expert] :].tolist()) <= {-1}

    experts_TK = torch.tensor(data.draw(st.lists(st.integers(-1, num_experts - 1), max_size=20)), dtype=torch.int64)
    positions_T = torch.arange(len(experts_TK)) * 7
    slots_TK = choose_slots(experts_TK.unsqueeze(1), table, rank=data.draw(st.integers(0, 63)), positions_T=positions_T)
    for expert, slot in zip(experts_TK.tolist(), slots_TK.flatten().tolist(), strict=True):
        assert slot == -1 if expert == -1 else placement.slot_experts[slot] == expert


def test_single_copies_on_full_ranks_are_the_identity() -> None:
    experts_TK = torch.tensor([[3, 0, -1], [7, 6, 5]])
    positions_T = torch.tensor([0, 9])
    assert torch.equal(choose_slots(experts_TK, spread(8, 4).table(), rank=1, positions_T=positions_T), experts_TK)


def test_an_empty_slot_shifts_the_ranks_behind_it() -> None:
    """5 experts on 2 ranks: (0 1 2 | 3 4 .); 5 on 3: (0 1 | 2 3 | 4 .). On 4: (0 1 | 2 . | 3 . | 4 .)"""
    experts_TK = torch.arange(5).unsqueeze(1)
    slots_TK = choose_slots(experts_TK, spread(5, 4).table(), rank=0, positions_T=torch.zeros(5, dtype=torch.int64))
    assert slots_TK.flatten().tolist() == [0, 1, 2, 4, 6]


COPIES = table_of([0], [1, 4, 7], [2, 5], list(range(8, 16)))


@pytest.mark.parametrize("expert", [1, 2, 3])
@pytest.mark.parametrize("case", ["one position, many rows", "one row, many steps", "many ranks"])
def test_copies_share_an_experts_tokens_evenly(expert: int, case: str) -> None:
    num_copies = int(COPIES.copies_E[expert])
    if case == "one position, many rows":
        slots = pick(expert, rank=3, positions_T=torch.full((4096,), 128))
    elif case == "one row, many steps":
        slots = torch.cat([pick(expert, rank=3, positions_T=torch.tensor([position])) for position in range(1024)])
    else:
        slots = torch.cat([pick(expert, rank=rank, positions_T=torch.full((32,), 128)) for rank in range(64)])
    counts = slots.bincount()[COPIES.slots_EX[expert, :num_copies]]
    assert counts.sum() == len(slots)
    assert counts.max() / counts.float().mean() < 1.15


def test_ranks_do_not_lean_on_the_same_copy() -> None:
    positions_T = torch.arange(256)
    picks = {rank: pick(3, rank=rank, positions_T=positions_T) for rank in range(8)}
    for rank in range(1, 8):
        assert (picks[0] == picks[rank]).float().mean() < 0.25


def test_the_same_input_picks_the_same_copy() -> None:
    positions_T = torch.arange(100)
    assert torch.equal(pick(3, rank=2, positions_T=positions_T), pick(3, rank=2, positions_T=positions_T))


def pick(expert: int, *, rank: int, positions_T: torch.Tensor) -> torch.Tensor:
    experts_TK = torch.full((len(positions_T), 1), expert)
    return choose_slots(experts_TK, COPIES, rank=rank, positions_T=positions_T).flatten()


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_redundant"), [(5, 3, 2), (32, 4, 8), (7, 7, 30), (9, 2, 9)])
def test_redundant_copies_are_even_and_never_on_a_rank_that_has_the_expert(
    num_experts: int, num_ranks: int, num_redundant: int
) -> None:
    placement = spread(num_experts, num_ranks, num_redundant)
    held = [[e for e in placement.experts_of(rank) if e >= 0] for rank in range(num_ranks)]
    assert placement.slots_per_rank == -(-(num_experts + num_redundant) // num_ranks)
    assert max(map(len, held)) - min(map(len, held)) <= 1
    assert all(len(set(experts)) == len(experts) for experts in held)
    everywhere = sorted(expert for experts in held for expert in experts)
    assert everywhere == sorted(copy % num_experts for copy in range(num_experts + num_redundant))


def test_spread_with_copies_as_drawn_in_its_docstring() -> None:
    assert spread(5, 3, 2).slot_experts == (0, 1, 2, 3, 4, -1, 0, 1, -1)
    assert spread(5, 3, 0) == spread(5, 3)


def test_more_copies_than_ranks_have_use_for_are_refused() -> None:
    for wrong, legal in ((11, 10), (-1, 0)):
        with pytest.raises(
            ValueError, match=rf"redundant_experts {wrong} must be from 0 to 10: .* so {legal} would do"
        ):
            spread(5, 3, wrong)
    assert spread(5, 3, 10).slots_per_rank == 5
    assert [most_copies(3, redundant) for redundant in (0, 1, 2, 9)] == [1, 2, 3, 3]


@pytest.mark.parametrize("top_k", [1, 2, 3, 8])
@pytest.mark.parametrize("num_copies", [2, 3, 4, 8])
@pytest.mark.parametrize("node_size", [1, 2, 8])
def test_copies_share_tokens_within_15_percent_of_their_mean(top_k: int, num_copies: int, node_size: int) -> None:
    """8 ranks, every expert with copies on `num_copies` of them; each rank looks up its own table."""
    num_experts, num_ranks = 8, 8
    rows = [sorted((expert + 3 * copy) % num_ranks for copy in range(num_copies)) for expert in range(num_experts)]
    held = [[expert for expert, ranks in enumerate(rows) if rank in ranks] for rank in range(num_ranks)]
    slots = tuple(expert for experts in held for expert in experts)
    placement = ExpertPlacement(num_ranks=num_ranks, slots_per_rank=num_copies, slot_experts=slots)
    landed = torch.zeros(len(slots))
    for rank in range(num_ranks):
        noise = torch.Generator().manual_seed(rank)
        experts_TK = torch.rand(4096, num_experts, generator=noise).argsort(dim=1)[:, :top_k]
        table = placement.table(rank=rank, node_size=node_size)
        positions_T = torch.randint(0, 4096, (4096,), generator=noise)
        landed += (
            choose_slots(experts_TK, table, rank=rank, positions_T=positions_T).flatten().bincount(minlength=len(slots))
        )
    for expert in range(num_experts):
        copies = landed[[slot for slot, held_ in enumerate(slots) if held_ == expert]]
        assert copies.max() / copies.mean() < 1.15


def test_a_rank_prefers_its_own_copy_and_then_its_nodes() -> None:
    placement = ExpertPlacement(num_ranks=4, slots_per_rank=1, slot_experts=(0, 1, 0, 1))
    experts_TK = torch.tensor([[0, 1]] * 64)
    positions_T = torch.arange(64)
    own = choose_slots(experts_TK, placement.table(rank=2), rank=2, positions_T=positions_T)
    assert set(own[:, 0].tolist()) == {2}
    assert set(own[:, 1].tolist()) == {1, 3}
    near = choose_slots(experts_TK, placement.table(rank=2, node_size=2), rank=2, positions_T=positions_T)
    assert set(map(tuple, near.tolist())) == {(2, 3)}


def test_a_tokens_choices_do_not_go_together() -> None:
    """Two experts with two copies each: all four pairs of copies are equally common."""
    table = table_of([0, 1], [2, 3])
    slots_TK = choose_slots(torch.tensor([[0, 1]] * 4096), table, rank=0, positions_T=torch.full((4096,), 9))
    pairs = (2 * slots_TK[:, 0] + slots_TK[:, 1] - 2).bincount(minlength=4)
    assert pairs.max() < 1.15 * 1024


def test_a_table_is_rewritten_in_place_when_the_placement_changes() -> None:
    old, new = spread(6, 3, 3), ExpertPlacement(num_ranks=3, slots_per_rank=3, slot_experts=(0, 1, 2, 3, 4, 0, 5, 0, 1))
    width = most_copies(3, 3)
    table = old.table(rank=1, width=width)
    held = table.slots_EX, table.copies_E, table.bounds_EX
    assert [tensor.shape[-1] for tensor in held] == [3, 7, 3]
    table.write(new.table(rank=1, width=width))
    for tensor, fresh in zip(held, (table.slots_EX, table.copies_E, table.bounds_EX), strict=True):
        assert tensor is fresh
    experts_TK = torch.arange(6).repeat(50, 1)
    slots_TK = choose_slots(experts_TK, table, rank=1, positions_T=torch.arange(50))
    assert torch.equal(torch.tensor(new.slot_experts)[slots_TK], experts_TK)
    with pytest.raises(AssertionError, match=r"\(7, 2\) over \(7, 3\)"):
        table.write(old.table(rank=1))

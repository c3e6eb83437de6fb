"""The published vectors of DeepSeek's EPLB, slot by slot, and the cases at its edges."""

import numpy as np
import pytest

from eplb import Problem, rank_loads
from eplb.deepseek import deepseek

README = np.array(
    [
        [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
        [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
    ],
    np.float64,
)


def problem(num_experts: int, num_ranks: int, num_copies: int, *, groups: int = 1, node_size: int = 0) -> Problem:
    return Problem(
        num_experts=num_experts,
        num_ranks=num_ranks,
        slots_per_rank=num_copies // num_ranks,
        num_copies=num_copies,
        node_size=node_size or num_ranks,
        groups=groups,
    )


def test_the_readmes_example_by_groups_and_nodes() -> None:
    slots = deepseek(README, problem(12, 8, 16, groups=4, node_size=4), None)
    assert slots.tolist() == [
        [5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1],
        [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1],
    ]
    assert rank_loads(README[0].tolist(), slots[0].tolist(), 8) == [121.5, 86.5, 125, 113, 147.5, 131.5, 156, 152]
    assert rank_loads(README[1].tolist(), slots[1].tolist(), 8) == [173, 179.5, 120.5, 172, 123, 152, 118.5, 117.5]


def test_the_readmes_example_without_groups_puts_two_copies_on_one_rank() -> None:
    slots = deepseek(README, problem(12, 8, 16), None)
    assert slots.tolist() == [
        [10, 6, 10, 7, 0, 2, 11, 4, 5, 9, 5, 4, 8, 3, 1, 1],
        [1, 10, 2, 4, 5, 11, 5, 0, 6, 7, 6, 3, 8, 8, 9, 7],
    ]


def test_the_counter_example_of_flashlb() -> None:
    loads = np.array([[600.0, 560, 120, 120, 20, 10, 10, 10]])
    slots = deepseek(loads, problem(8, 8, 16), None)
    assert slots.tolist() == [[0, 1, 2, 1, 3, 1, 0, 4, 0, 5, 0, 6, 0, 7, 1, 1]]
    assert max(rank_loads(loads[0].tolist(), slots[0].tolist(), 8)) == 232


def test_groups_that_no_number_of_nodes_divides_are_planned_as_one() -> None:
    alone = deepseek(README, problem(12, 8, 16), None)
    assert np.array_equal(deepseek(README, problem(12, 8, 16, groups=3, node_size=4), None), alone)


@pytest.mark.parametrize("loads", [README, np.zeros((2, 12)), np.eye(12)[:2] * 50, README.astype(np.int64)])
@pytest.mark.parametrize(("num_ranks", "num_copies"), [(1, 12), (1, 13), (12, 12), (4, 12), (3, 18), (24, 24)], ids=str)
def test_slots_are_those_of_hand_written_loops(loads: np.ndarray, num_ranks: int, num_copies: int) -> None:
    slots = deepseek(loads, problem(12, num_ranks, num_copies), None)
    for layer, held in zip(loads, slots, strict=True):
        assert held.tolist() == simple(layer.tolist(), num_ranks, num_copies)


def simple(weights: list[float], num_ranks: int, num_copies: int) -> list[int]:
    """The global policy for one layer, as one would tell it: by hand-written loops."""
    experts, counts = list(range(len(weights))), [1] * len(weights)
    while len(experts) < num_copies:
        shares = [np.float32(weight) / np.float32(count) for weight, count in zip(weights, counts, strict=True)]
        chosen = shares.index(max(shares))
        counts[chosen] += 1
        experts.append(chosen)
    shares = [float(np.float32(weights[expert]) / np.float32(counts[expert])) for expert in experts]
    return [experts[item] for bin_ in pack(shares, num_ranks) for item in bin_]


def pack(weights: list[float], num_packs: int) -> list[list[int]]:
    room = len(weights) // num_packs
    if room == 1:
        return [[item] for item in range(num_packs)]
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    for item in sorted(range(len(weights)), key=lambda item: -weights[item]):
        open_packs = [index for index in range(num_packs) if len(packs[index]) < room]
        packs[min(open_packs, key=lambda index: sum(weights[i] for i in packs[index]))].append(item)
    return packs

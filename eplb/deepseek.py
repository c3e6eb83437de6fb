"""Policy "deepseek": the algorithm of DeepSeek's EPLB, to the slot (https://github.com/deepseek-ai/EPLB).

    hierarchical    groups of experts are packed to nodes, experts replicated inside their node, and packed to its ranks
    global          the same with one group and one node, where groups cannot be dealt evenly to nodes

It looks at averages only, may put two copies of an expert on one rank, and does not look at what sits where now; policy
"serried" is held against it. Numbers are float32, as there: ties depend on it.

Legend: B rows, E experts, P copies, Y layers.
"""

from __future__ import annotations

import numpy as np

from .problem import Problem


def deepseek(loads_YE: np.ndarray, problem: Problem, old_YS: np.ndarray | None) -> np.ndarray:
    """A `Policy`. The number of copies must be a multiple of the ranks."""
    del old_YS  # the published algorithm starts anew every time
    assert problem.num_copies == problem.num_ranks * problem.slots_per_rank, f"{problem}"
    nodes = problem.num_nodes
    groups = problem.groups if nodes > 1 else 1
    return _hierarchical(loads_YE.astype(np.float32), problem, groups=groups, nodes=nodes)


def _hierarchical(loads_YE: np.ndarray, problem: Problem, *, groups: int, nodes: int) -> np.ndarray:
    num_layers, num_experts = loads_YE.shape
    size, copies, ranks = num_experts // groups, problem.num_copies // nodes, problem.num_ranks // nodes
    group_loads = loads_YE.reshape(num_layers, groups, size).sum(axis=2)
    node, place = _balanced_packing(group_loads, nodes)
    # Experts in the order in which they come to lie: node by node, group by group.
    first = (node * (groups // nodes) + place) * size
    to_new = (first[:, :, None] + np.arange(size)).reshape(num_layers, num_experts)
    order_YE = to_new.argsort(axis=1)

    by_node = np.take_along_axis(loads_YE, order_YE, axis=1).reshape(num_layers * nodes, -1)
    expert_BP, counts_BE = _replicate(by_node, copies)
    share_BP = np.take_along_axis(by_node / counts_BE.astype(np.float32), expert_BP, axis=1)
    rank, place = _balanced_packing(share_BP, ranks)
    slot_BP = rank * (copies // ranks) + place
    packed_BP = np.take_along_axis(expert_BP, slot_BP.argsort(axis=1), axis=1)
    whose = packed_BP.reshape(num_layers, nodes, copies) + np.arange(nodes)[None, :, None] * (num_experts // nodes)
    return np.take_along_axis(order_YE, whose.reshape(num_layers, -1), axis=1)


def _balanced_packing(weights_BN: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [B, N] twice, pack and place in it: heaviest first, each to the lightest pack with room, first on a tie."""
    num_rows, num_items = weights_BN.shape
    room = num_items // num_packs
    if room == 1:
        return np.tile(np.arange(num_items), (num_rows, 1)), np.zeros((num_rows, num_items), np.int64)
    rows = np.arange(num_rows)
    order_BN = (-weights_BN).argsort(axis=1, kind="stable")
    loads, filled = np.zeros((num_rows, num_packs), np.float32), np.zeros((num_rows, num_packs), np.int64)
    pack_BN, place_BN = np.empty((num_rows, num_items), np.int64), np.empty((num_rows, num_items), np.int64)
    for item in order_BN.T:
        pack = np.where(filled < room, loads, np.inf).argmin(axis=1)
        pack_BN[rows, item], place_BN[rows, item] = pack, filled[rows, pack]
        loads[rows, pack] += weights_BN[rows, item]
        filled[rows, pack] += 1
    return pack_BN, place_BN


def _replicate(weights_BE: np.ndarray, num_copies: int) -> tuple[np.ndarray, np.ndarray]:
    """int64 [B, P] expert of each copy, [B, E] copies of each: one, then by the largest share, first on a tie."""
    num_rows, num_experts = weights_BE.shape
    rows = np.arange(num_rows)
    counts_BE = np.ones((num_rows, num_experts), np.int64)
    expert_BP = np.tile(np.arange(num_copies), (num_rows, 1))
    for copy in range(num_experts, num_copies):
        chosen = (weights_BE / counts_BE.astype(np.float32)).argmax(axis=1)
        expert_BP[:, copy] = chosen
        counts_BE[rows, chosen] += 1
    return expert_BP, counts_BE

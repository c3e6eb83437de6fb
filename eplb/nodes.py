"""Experts dealt to nodes, group by group, so that each node is a small problem of its own.

A model that limits routing to some groups of experts visits few nodes if a group sits on one. Where that does not apply
there is one node that gets all experts. Pure; the layout of arrays is that of `packing`.

Legend: Y layers, B rows = nodes of layers, E experts, Z = E experts and "empty", R ranks, L local slots of a rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .packing import level, pack
from .problem import Problem

_ROUNDS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Deal:
    """Experts dealt to nodes: row b is node b % N of layer b // N; its expert i is experts_BE[b, i] of the layer."""

    experts_BE: np.ndarray
    num_experts: int
    num_nodes: int

    def split(self, values_YZ: np.ndarray) -> np.ndarray:
        """[Y, Z] of layers as [B, Z] of their nodes; the last column stays the last."""
        with_empty = np.pad(self.experts_BE, ((0, 0), (0, 1)), constant_values=self.num_experts)
        return np.take_along_axis(np.repeat(values_YZ, self.num_nodes, axis=0), with_empty, axis=1)

    def split_slots(self, slots_YRL: np.ndarray) -> np.ndarray:
        """Slots of layers as slots of their nodes, experts by their place there."""
        num_layers, num_ranks, num_local = slots_YRL.shape
        place = np.zeros((len(self.experts_BE), self.num_experts + 1), np.int64)
        np.put_along_axis(place, self.experts_BE, np.arange(self.experts_BE.shape[1])[None], axis=1)
        place[:, -1] = self.experts_BE.shape[1]
        by_node = slots_YRL.reshape(num_layers * self.num_nodes, -1)
        return np.take_along_axis(place, by_node, axis=1).reshape(-1, num_ranks // self.num_nodes, num_local)

    def join_slots(self, slots_BRL: np.ndarray) -> np.ndarray:
        """The way back."""
        num_rows, node_ranks, num_local = slots_BRL.shape
        with_empty = np.pad(self.experts_BE, ((0, 0), (0, 1)), constant_values=self.num_experts)
        named = np.take_along_axis(with_empty, slots_BRL.reshape(num_rows, -1), axis=1)
        return named.reshape(num_rows // self.num_nodes, node_ranks * self.num_nodes, num_local)


def deal_groups(weights_YZ: np.ndarray, problem: Problem) -> Deal:
    """Groups packed to nodes by their loads, an equal number to each."""
    nodes, num_layers = problem.num_nodes, len(weights_YZ)
    size = problem.num_experts // problem.groups
    loads = weights_YZ[:, :-1].reshape(num_layers, problem.groups, size).sum(axis=2)
    loads = np.pad(loads, ((0, 0), (0, 1)))
    one_each = np.ones(loads.shape, np.int64)
    one_each[:, -1] = 0
    groups = pack(loads, one_each, num_ranks=nodes, slots_per_rank=problem.groups // nodes)
    level(loads, groups, target_B=loads.sum(axis=1) / nodes, rounds=_ROUNDS)
    experts = np.sort(groups, axis=2)[..., None] * size + np.arange(size)
    return Deal(experts_BE=experts.reshape(num_layers * nodes, -1), num_experts=problem.num_experts, num_nodes=nodes)


def deal_as_held(old_YRL: np.ndarray, problem: Problem) -> Deal:
    """Experts where they are; `_usable` has seen that every node has its number."""
    nodes = problem.num_nodes
    experts = np.nonzero(held_by_nodes(old_YRL, problem))[2].reshape(len(old_YRL) * nodes, -1)
    return Deal(experts_BE=experts, num_experts=problem.num_experts, num_nodes=nodes)


def held_by_nodes(slots_YRL: np.ndarray, problem: Problem) -> np.ndarray:
    """bool [Y, nodes, E]"""
    by_node = slots_YRL.reshape(len(slots_YRL), problem.num_nodes, -1)
    held = np.zeros((*by_node.shape[:2], problem.num_experts + 1), bool)
    np.put_along_axis(held, by_node, True, axis=2)
    return held[:, :, :-1]

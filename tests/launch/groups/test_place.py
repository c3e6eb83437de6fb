"""What carries rows, decided from what was asked, who started the ranks, and where tensors live."""

from dataclasses import replace

import pytest
import torch

from launch.groups.place import GroupFlags, node_id, transport_of
from launch.groups.world import World, own_world
from runtime import EngineConfig
from runtime.settings.settling import Settled, settle

MPIRUN = replace(own_world(0, 2), source="mpirun")


@pytest.fixture(scope="module")
def on_cpu() -> Settled:
    return settle(EngineConfig(model="profiles/models/tiny-v3", ranks=2))


@pytest.mark.parametrize(
    ("asked", "world", "device", "found"),
    [
        ("auto", own_world(0, 2), "cpu", "gloo"),
        ("auto", MPIRUN, "cpu", "mpi"),
        ("auto", MPIRUN, "cuda", "nccl"),
        ("gloo", MPIRUN, "cpu", "gloo"),
    ],
)
def test_what_fits_is_taken(on_cpu: Settled, asked, world: World, device: str, found: str):
    assert transport_of(GroupFlags(transport=asked), world, replace(on_cpu, device=torch.device(device))) == found


@pytest.mark.parametrize(
    ("asked", "world", "device", "words"),
    [
        ("gloo", own_world(0, 2), "cuda", "rows there travel over nccl"),
        ("mpi", MPIRUN, "cuda", "rows there travel over nccl"),
        ("nccl", MPIRUN, "cpu", "rows there travel over gloo or mpi"),
        ("mpi", own_world(0, 2), "cpu", "use mpirun, or gloo"),
        ("threads", own_world(0, 2), "cpu", "one of several"),
    ],
)
def test_what_cannot_be_is_refused_in_words(on_cpu: Settled, asked, world: World, device: str, words: str):
    with pytest.raises(ValueError, match=words):
        transport_of(GroupFlags(transport=asked), world, replace(on_cpu, device=torch.device(device)))


def test_processes_of_one_node_have_one_id():
    assert node_id() == node_id()
    assert 0 <= node_id() < 2**63

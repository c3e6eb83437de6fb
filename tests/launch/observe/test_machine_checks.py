"""Every fault that a machine can have is found, said in words, and told what it means and what to try."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from launch.observe.machine_checks import machine_checks
from launch.observe.machine_facts import (
    GpuFacts,
    InterfaceFacts,
    MachineFacts,
    find_facts,
    loaded_libraries,
    rdma_ports,
)
from runtime.failure.checkup import Finding, Outcome, look

H200 = GpuFacts(name="NVIDIA H200", capability=(9, 0), memory_bytes=139 << 30)
GOOD = MachineFacts(
    torch="2.11.0+cu128",
    cuda_build="12.8",
    cuda_error="",
    driver="570.86",
    triton="3.6.0",
    nccl="2.28.3",
    nccl_files=("/lib/libnccl.so.2",),
    gpus=(H200, H200),
    apart=(),
    topology=(),
    interfaces=(InterfaceFacts(name="eth0", address="10.0.0.1", speed=100_000),),
    rdma=(("mlx5_0:1", "ACTIVE, 400 Gb/sec"),),
    shared_bytes=16 << 30,
)


def found(
    facts: MachineFacts, *, on_gpu: bool = True, num_nodes: int = 1, interface: str = "eth0"
) -> dict[str, Finding]:
    checks = machine_checks(facts, on_gpu=on_gpu, num_nodes=num_nodes, interface=interface)
    return {finding.name: finding for finding in map(look, checks)}


def test_a_good_machine_has_no_faults():
    assert {finding.outcome for finding in found(GOOD, num_nodes=2).values()} == {Outcome.OK}


@pytest.mark.parametrize(
    ("name", "changes", "outcome", "words"),
    [
        ("driver", {"driver": None}, Outcome.FAILED, "driver does not answer"),
        ("driver", {"cuda_error": "CUDA driver version is insufficient"}, Outcome.FAILED, "is insufficient"),
        ("torch", {"cuda_build": None}, Outcome.FAILED, "is a build without CUDA"),
        ("torch", {"torch": "2.10.0+cu128"}, Outcome.DOUBTFUL, "tried were 2.11 to 2.13"),
        ("torch", {"torch": "2.14.0.dev1"}, Outcome.DOUBTFUL, "2.14.0.dev1"),
        ("triton", {"triton": None}, Outcome.FAILED, "not installed"),
        ("triton", {"triton": "3.10.0"}, Outcome.DOUBTFUL, "tried were 3.6 to 3.9"),
        ("GPUs", {"gpus": ()}, Outcome.FAILED, "there are none"),
        ("GPUs", {"gpus": (replace(H200, name="A100", capability=(8, 0)),)}, Outcome.FAILED, "A100 (sm_80)"),
        ("GPUs", {"gpus": (H200, replace(H200, name="H100"))}, Outcome.DOUBTFUL, "unlike each other"),
        ("clocks", {"gpus": (H200, replace(H200, held_down=("it is hot",)))}, Outcome.DOUBTFUL, "GPU 1: it is hot"),
        ("clocks", {"gpus": (replace(H200, silent="no permission"),)}, Outcome.NOT_CHECKED, "no permission"),
        ("peer access", {"apart": ((0, 1),)}, Outcome.FAILED, "GPUs 0-1 cannot reach"),
        ("peer access", {"gpus": (H200,)}, Outcome.NOT_CHECKED, "one GPU"),
        ("NCCL", {"nccl": None}, Outcome.FAILED, "torch has no NCCL"),
        ("NCCL", {"nccl_files": ("/a/libnccl.so", "/b/libnccl.so")}, Outcome.FAILED, "2 libraries are loaded"),
        ("NCCL", {"nccl": "2.21.5"}, Outcome.DOUBTFUL, "2.27 or later"),
        ("shared memory", {"shared_bytes": 64 << 20}, Outcome.FAILED, "0.1 GiB free"),
    ],
)
def test_each_fault_is_found_and_explained(name, changes, outcome, words):
    finding = found(replace(GOOD, **changes))[name]
    assert finding.outcome is outcome, finding
    assert words in finding.words
    if outcome in (Outcome.FAILED, Outcome.DOUBTFUL):
        assert finding.means
        assert finding.tries


@pytest.mark.parametrize(
    ("interface", "rdma", "outcome", "words"),
    [
        ("ib7", GOOD.rdma, Outcome.FAILED, "interface ib7 has no IPv4 address here"),
        ("lo", GOOD.rdma, Outcome.FAILED, "2 nodes meet over loopback"),
        ("eth0", (), Outcome.DOUBTFUL, "no RDMA port is active"),
        ("eth0", (("mlx5_0:1", "DOWN"),), Outcome.DOUBTFUL, "no RDMA port is active"),
        ("10.0.0.1", GOOD.rdma, Outcome.OK, "eth0 10.0.0.1 at 100 Gb/s, lo 127.0.0.1, mlx5_0:1 ACTIVE"),
    ],
)
def test_a_network_that_will_not_do_is_named(interface, rdma, outcome, words):
    loopback = InterfaceFacts(name="lo", address="127.0.0.1")
    facts = replace(GOOD, rdma=rdma, interfaces=(*GOOD.interfaces, loopback))
    finding = found(facts, num_nodes=2, interface=interface)["network"]
    assert finding.outcome is outcome
    assert words in finding.words


def test_without_gpus_what_only_they_need_is_not_checked():
    bare = replace(
        GOOD, cuda_build=None, driver=None, triton=None, nccl=None, gpus=(), torch="2.13.0+cpu", shared_bytes=0
    )
    outcomes = {name: finding.outcome for name, finding in found(bare, on_gpu=False).items()}
    assert Outcome.FAILED not in outcomes.values()
    assert [name for name, outcome in outcomes.items() if outcome is Outcome.OK] == ["torch", "network"]


def test_this_machine_has_facts():
    facts = find_facts()
    assert facts.torch
    assert "lo" in {each.name for each in facts.interfaces}


def test_libraries_are_found_among_what_is_mapped(tmp_path: Path):
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 08:01 12 "
    maps.write_text(
        f"{line}/usr/lib/libnccl.so.2\n{line}/usr/lib/libnccl.so.2\n{line}/opt/x/libnccl.so.2.27\n{line}[heap]\n"
    )
    assert loaded_libraries(maps, "libnccl") == ("/opt/x/libnccl.so.2.27", "/usr/lib/libnccl.so.2")
    assert loaded_libraries(tmp_path / "none", "libnccl") == ()


def test_rdma_ports_are_read_as_the_kernel_writes_them(tmp_path: Path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    assert list(rdma_ports(tmp_path)) == [("mlx5_0:1", "ACTIVE, 400 Gb/sec (4X NDR)")]

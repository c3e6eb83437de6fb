"""Whether a machine is fit for a run, from what there is on it; every failure with what it means and what to try.

Pure: facts in, words or exceptions out. `on_gpu` says whether the run is to use GPUs; what only GPUs need is not
checked without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from runtime.failure.checkup import Check, Doubt, NotHere

from .machine_facts import MachineFacts

TORCH = ((2, 11), (2, 13))
TRITON = ((3, 6), (3, 9))
"""First and last minor versions that this was written for."""
LEAST_NCCL = (2, 27)
HOPPER = (9, 0)
LEAST_SHARED_BYTES = 1 << 30


def machine_checks(facts: MachineFacts, *, on_gpu: bool, num_nodes: int, interface: str) -> Iterator[Check]:
    """In the order in which one rests on another."""
    gpu = partial(_only_on_gpu, on_gpu)
    yield Check(
        name="driver",
        run=gpu(partial(_driver, facts)),
        means="the process cannot use a GPU at all",
        tries="nvidia-smi on this node; in a container --gpus all and the NVIDIA container toolkit",
    )
    yield Check(
        name="torch",
        run=partial(_torch, facts, on_gpu=on_gpu),
        means="this torch cannot run the engine on a GPU, or nobody has tried it with this version",
        tries="pip install 'torch>=2.11,<2.14' from the index of the CUDA version that the driver supports",
    )
    yield Check(
        name="triton",
        run=partial(_triton, facts, on_gpu=on_gpu),
        means="kernels cannot be compiled, or nobody has tried them with this compiler",
        tries="pip install 'serried[gpu]'; or --ops reference, which is slow",
    )
    yield Check(
        name="GPUs",
        run=gpu(partial(_gpus, facts)),
        means="kernels are written for Hopper's matrix units and fp8",
        tries="a node with H100, H200 or newer; CUDA_VISIBLE_DEVICES hides the others",
    )
    yield Check(
        name="clocks",
        run=gpu(partial(_clocks, facts)),
        means="every step waits for its slowest rank, and this GPU will be it",
        tries="nvidia-smi -q -d CLOCK,PERFORMANCE; cooling, power caps, and whoever else uses the GPU",
    )
    yield Check(
        name="peer access",
        run=gpu(partial(_peers, facts)),
        means="rows between these GPUs go through the host's memory, several times slower",
        tries="nvidia-smi topo -m; all GPUs of the node in one container; PCIe ACS and the IOMMU off",
    )
    yield Check(
        name="NCCL",
        run=gpu(partial(_nccl, facts)),
        means="ranks cannot exchange rows, or use another library than torch was built with",
        tries="unset LD_PRELOAD and LD_LIBRARY_PATH; pip install 'serried[cu12]'; only one nvidia-nccl package",
    )
    yield Check(
        name="shared memory",
        run=gpu(partial(_shared, facts)),
        means="NCCL keeps its rings inside a node there, and fails in words that do not say so",
        tries="docker run --shm-size=16g, or --ipc=host",
    )
    yield Check(
        name="network",
        run=partial(_network, facts, num_nodes=num_nodes, interface=interface),
        means="ranks of other nodes cannot be reached, or only slowly",
        tries="--interface with a name from the list; ibstat; the network card's drivers in the container",
    )


def _only_on_gpu(on_gpu: bool, run: Callable[[], str]) -> Callable[[], str]:
    return run if on_gpu else _no_gpu


def _no_gpu() -> str:
    raise NotHere("only a run on GPUs needs it")


def _driver(facts: MachineFacts) -> str:
    if facts.driver is None:
        raise ValueError("NVIDIA's driver does not answer")
    if facts.cuda_error:
        raise ValueError(f"driver {facts.driver} answers, but torch sees no GPU: {facts.cuda_error}")
    return facts.driver


def _torch(facts: MachineFacts, *, on_gpu: bool) -> str:
    if on_gpu and facts.cuda_build is None:
        raise ValueError(f"{facts.torch} is a build without CUDA")
    words = facts.torch + (f", CUDA {facts.cuda_build}" if facts.cuda_build else ", without CUDA")
    return _tried(words, facts.torch, TORCH)


def _triton(facts: MachineFacts, *, on_gpu: bool) -> str:
    if facts.triton is None:
        if on_gpu:
            raise ValueError("it is not installed")
        raise NotHere("it is not installed, and a CPU does without")
    return _tried(facts.triton, facts.triton, TRITON)


def _tried(words: str, version: str, known: tuple[tuple[int, int], tuple[int, int]]) -> str:
    """`words`; Doubt for a version outside of what is known to work."""
    first, last = known
    if not first <= _numbers(version)[:2] <= last:
        between = f"{first[0]}.{first[1]} to {last[0]}.{last[1]}"
        raise Doubt(f"{words}; tried were {between}")
    return words


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers: 2.13.0+cu126 -> (2, 13, 0)."""
    found = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        found.append(int(part))
    return tuple(found)


def _gpus(facts: MachineFacts) -> str:
    if not facts.gpus:
        raise ValueError("there are none")
    old = [f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in facts.gpus if gpu.capability < HOPPER]
    if old:
        raise ValueError(f"{', '.join(old)}; at least sm_90 is needed")
    if len({gpu.name for gpu in facts.gpus}) > 1:
        raise Doubt(f"unlike each other: {', '.join(gpu.name for gpu in facts.gpus)}")
    return f"{len(facts.gpus)} x {facts.gpus[0].name}, {facts.gpus[0].memory_bytes / 2**30:.0f} GiB"


def _clocks(facts: MachineFacts) -> str:
    slow = [f"GPU {index}: {'; '.join(gpu.held_down)}" for index, gpu in enumerate(facts.gpus) if gpu.held_down]
    if slow:
        raise Doubt(", ".join(slow))
    silent = [gpu.silent for gpu in facts.gpus if gpu.silent]
    if silent or not facts.gpus:
        raise NotHere(silent[0] if silent else "there is no GPU")
    return "nothing holds them down"


def _peers(facts: MachineFacts) -> str:
    if len(facts.gpus) < 2:
        raise NotHere("there is one GPU here")
    if facts.apart:
        pairs = ", ".join(f"{one}-{other}" for one, other in facts.apart)
        raise ValueError(f"GPUs {pairs} cannot reach each other's memory")
    return f"all {len(facts.gpus)} GPUs reach each other"


def _nccl(facts: MachineFacts) -> str:
    if facts.nccl is None:
        raise ValueError("torch has no NCCL")
    if len(facts.nccl_files) > 1:
        raise ValueError(f"{len(facts.nccl_files)} libraries are loaded: {', '.join(facts.nccl_files)}")
    words = f"{facts.nccl}, {facts.nccl_files[0] if facts.nccl_files else 'inside torch'}"
    if _numbers(facts.nccl) < LEAST_NCCL:
        raise Doubt(f"{words}; captured exchanges are written for {LEAST_NCCL[0]}.{LEAST_NCCL[1]} or later")
    return words


def _shared(facts: MachineFacts) -> str:
    words = f"{facts.shared_bytes / 2**30:.1f} GiB free in /dev/shm"
    if facts.shared_bytes < LEAST_SHARED_BYTES:
        raise ValueError(words)
    return words


def _network(facts: MachineFacts, *, num_nodes: int, interface: str) -> str:
    listed = [
        f"{each.name} {each.address}" + (f" at {each.speed / 1000:g} Gb/s" if each.speed else "")
        for each in facts.interfaces
    ]
    ports = [f"{name} {state}" for name, state in facts.rdma]
    words = ", ".join([*listed, *ports])
    names = {each.name for each in facts.interfaces} | {each.address for each in facts.interfaces}
    if interface not in names:
        raise ValueError(f"interface {interface} has no IPv4 address here; there is {words}")
    if num_nodes > 1 and interface in ("lo", "127.0.0.1"):
        raise ValueError(f"{num_nodes} nodes meet over loopback; there is {words}")
    if num_nodes > 1 and not any("ACTIVE" in state for _, state in facts.rdma):
        raise Doubt(f"no RDMA port is active: rows between nodes go over TCP; there is {words}")
    return words

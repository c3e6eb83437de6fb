"""What there is on this machine: driver, libraries, GPUs and how they reach each other, network interfaces.

Asks torch, NVML, /proc and /sys, and judges nothing (see `machine_checks`). What cannot be asked is None or empty. On
a machine without a GPU most of it is. Its questions about GPUs have never been asked of one.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ep.torch_dist import address_of
from runtime.failure.gpu_health import GpuHealth, load_library

ASK_S = 10.0
"""How long nvidia-smi may take."""
_VERSION_BYTES = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU; `held_down` are its driver's words for why it is slow, `silent` why it does not say."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    held_down: tuple[str, ...] = ()
    silent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceFacts:
    """A network interface with an IPv4 address; speed in Mb/s, 0 where it does not say."""

    name: str
    address: str
    speed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All of it.

    cuda_build    the CUDA that torch was built for; None: a CPU build
    cuda_error    why torch sees no GPU, "" where it does
    nccl          version that torch uses; nccl_files: the libraries that this process has loaded
    apart         pairs of GPUs that cannot reach each other's memory
    topology      what nvidia-smi says of it, a line each
    rdma          (port, state) of each
    shared_bytes  free in /dev/shm
    """

    torch: str
    cuda_build: str | None
    cuda_error: str
    driver: str | None
    triton: str | None
    nccl: str | None
    nccl_files: tuple[str, ...]
    gpus: tuple[GpuFacts, ...]
    apart: tuple[tuple[int, int], ...]
    topology: tuple[str, ...]
    interfaces: tuple[InterfaceFacts, ...]
    rdma: tuple[tuple[str, str], ...]
    shared_bytes: int


def find_facts() -> MachineFacts:
    """Ask; takes a second or two on a GPU node. Initialises CUDA where it can be."""
    error = _cuda_error()
    count = 0 if error else torch.cuda.device_count()
    return MachineFacts(
        torch=torch.__version__,
        cuda_build=torch.version.cuda,
        cuda_error=error,
        driver=_driver_version(load_library()),
        triton=_installed("triton"),
        nccl=_nccl_version(error),
        nccl_files=loaded_libraries(Path("/proc/self/maps"), "libnccl"),
        gpus=tuple([_gpu(index) for index in range(count)]),
        apart=tuple(_apart(count)),
        topology=_topology() if count else (),
        interfaces=tuple(_interfaces()),
        rdma=tuple(rdma_ports(Path("/sys/class/infiniband"))),
        shared_bytes=_free_bytes("/dev/shm"),
    )


def _cuda_error() -> str:
    if torch.version.cuda is None:
        return "torch is a build without CUDA"
    if torch.cuda.is_available():
        return ""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0]
    return "torch.cuda.is_available() is False"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver_version(library: Any | None) -> str | None:
    """Of NVML; None without a driver."""
    if library is None or library.nvmlInit_v2():
        return None
    text = ctypes.create_string_buffer(_VERSION_BYTES)
    code = library.nvmlSystemGetDriverVersion(text, _VERSION_BYTES)
    library.nvmlShutdown()
    return None if code else text.value.decode()


def _nccl_version(cuda_error: str) -> str | None:
    if cuda_error or not torch.distributed.is_nccl_available():
        return None
    from_torch: Any = torch.cuda  # its stubs leave nccl out
    return ".".join(map(str, from_torch.nccl.version()))


def loaded_libraries(maps: Path, stem: str) -> tuple[str, ...]:
    """Files of that name that this process has mapped."""
    try:
        lines = maps.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = {line.split(maxsplit=5)[-1] for line in lines if f"/{stem}" in line}
    return tuple(sorted(paths))


def _gpu(index: int) -> GpuFacts:
    properties = torch.cuda.get_device_properties(index)
    with GpuHealth(f"GPU-{properties.uuid}", load_library()) as health:
        held_down, silent = health.reasons(), health.missing
    return GpuFacts(
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
        held_down=held_down,
        silent=silent,
    )


def _apart(count: int) -> Iterator[tuple[int, int]]:
    for one in range(count):
        for other in range(one + 1, count):
            if not torch.cuda.can_device_access_peer(one, other):
                yield one, other


def _topology() -> tuple[str, ...]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        done = subprocess.run([program, "topo", "-m"], capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    return tuple([line.rstrip() for line in plain.splitlines() if line.strip()]) if done.returncode == 0 else ()


def _interfaces() -> Iterator[InterfaceFacts]:
    for _, name in socket.if_nameindex():
        try:
            address = address_of(name)
        except ValueError:  # it has none
            continue
        yield InterfaceFacts(name=name, address=address, speed=_speed(Path("/sys/class/net") / name / "speed"))


def _speed(path: Path) -> int:
    try:
        return max(int(path.read_text("ascii")), 0)
    except (OSError, ValueError):  # it does not say
        return 0


def rdma_ports(folder: Path) -> Iterator[tuple[str, str]]:
    """(device:port, state) of each, as in ("mlx5_0:1", "ACTIVE, 400 Gb/sec (4X NDR)")."""
    for port in sorted(folder.glob("*/ports/*")):
        words = []
        for name in ("state", "rate"):
            try:
                words.append((port / name).read_text("ascii").split(": ")[-1].strip())
            except OSError:
                continue
        yield f"{port.parent.parent.name}:{port.name}", ", ".join(words)


def _free_bytes(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize

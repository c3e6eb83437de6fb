"""One Triton kernel compiled for a GPU that need not be here: registers, spills, shared memory, instructions.

The numbers are those of ptxas, the assembler that Triton brings along, on the way to the very code that would run. What
was found is kept beside Triton's own cache, under the kernel's source and all that it was compiled for.
Needs triton. Knows one kernel; which there are is said by the rooms' `kernel_shapes`.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INSTRUCTIONS = {
    "wgmma": re.compile(r"wgmma\.mma_async"),
    "cp.async": re.compile(r"cp\.async\.c[ag]\."),
    "tma": re.compile(r"cp\.async\.bulk\.tensor"),
}
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED_LIMIT = 227 * 1024
REGISTER_LIMIT = 64 * 1024
"""Of a block of threads on sm_90."""
WARP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """How one kernel came out."""

    title: str
    registers: int
    spilled_bytes: int
    """Stores and loads."""
    shared_bytes: int
    threads: int
    instructions: dict[str, int]
    """How often each of INSTRUCTIONS occurs."""
    faults: list[str]
    seconds: float
    """What compiling took, whenever that was."""


def compile_kernel(shape: Mapping[str, Any], *, capability: int, fresh: bool) -> Report:
    """Compile a line of a room's `kernel_shapes`, or read what was found before unless `fresh`."""
    path = _folder() / f"{_key(shape, capability)}.json"
    if path.is_file() and not fresh:
        return Report(**json.loads(path.read_text("utf-8")))
    report = _compile(shape, capability)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{time.monotonic_ns()}")
    draft.write_text(json.dumps(asdict(report)), "utf-8")
    draft.replace(path)
    return report


def _folder() -> Path:
    return Path(knobs.cache.dir) / "serried-reports"


def _key(shape: Mapping[str, Any], capability: int) -> str:
    parts = [triton.__version__, capability, shape["title"], shape["kernel"].cache_key]
    parts += [sorted(shape[name].items(), key=str) for name in ("signature", "constants", "options")]
    parts += [sorted(shape["must"]), Path(__file__).read_text("utf-8")]
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _compile(shape: Mapping[str, Any], capability: int) -> Report:
    said, start = io.StringIO(), time.monotonic()
    nvidia, compilation = knobs.nvidia, knobs.compilation
    # A kernel out of Triton's cache would say nothing of registers.
    with nvidia.scope(), compilation.scope(), contextlib.redirect_stdout(said):
        nvidia.dump_ptxas_log = True
        compilation.always_compile = True
        compiled = triton.compile(
            _source(shape),
            target=GPUTarget("cuda", capability, WARP),
            options={"enable_fp_fusion": True, **shape["options"]},
        )
    return report_of(
        shape["title"],
        log=said.getvalue(),
        code=compiled.asm["ptx"],
        shared_bytes=compiled.metadata.shared,
        threads=compiled.metadata.num_warps * WARP,
        must=shape["must"],
        seconds=time.monotonic() - start,
    )


def _source(shape: Mapping[str, Any]) -> ASTSource:
    """What a launch with such arguments would compile: Triton specialises on alignment."""
    kernel, constants = shape["kernel"], shape["constants"]
    signature, hints = {}, {}
    for index, name in enumerate(kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind, _, aligned = shape["signature"][name].partition(":")
        signature[name] = kind
        if (aligned or ("16" if kind.startswith("*") else "1")) == "16":
            hints[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, hints)


def report_of(
    title: str, *, log: str, code: str, shared_bytes: int, threads: int, must: set[str], seconds: float
) -> Report:
    """A report from what the assembler said (`log`) and from the assembly it was given (`code`)."""
    registers = max(map(int, REGISTERS.findall(log)), default=0)
    spilled = sum(int(stores) + int(loads) for stores, loads in SPILLS.findall(log))
    instructions = {name: len(pattern.findall(code)) for name, pattern in INSTRUCTIONS.items()}
    faults = [f"no {name}" for name in sorted(must) if not instructions[name]]
    if not SPILLS.search(log) or not registers:
        faults.append("the assembler said nothing of registers")
    if spilled:
        faults.append(f"{spilled} bytes spilled")
    if shared_bytes > SHARED_LIMIT:
        faults.append(f"{shared_bytes} bytes of shared memory, more than {SHARED_LIMIT}")
    if registers * threads > REGISTER_LIMIT:
        faults.append(f"{registers} registers in {threads} threads, more than {REGISTER_LIMIT}")
    return Report(
        title=title,
        registers=registers,
        spilled_bytes=spilled,
        shared_bytes=shared_bytes,
        threads=threads,
        instructions=instructions,
        faults=faults,
        seconds=round(seconds, 2),
    )

"""`serried bench compile`: all kernels compile for Hopper without faults, and a fault is told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Literal

import pytest

from launch.bench.bench_compile import CompileFlags, report_table, run, summary
from launch.bench.compile_report import REGISTER_LIMIT, SHARED_LIMIT, Report, report_of
from launch.command.generate import prepare_kernels
from launch.commands import REFUSED
from launch.groups.refusal import Refusal
from runtime import EngineConfig

LOG = """ptxas info    : Function properties for attend
    {frame} bytes stack frame, {stores} bytes spill stores, {loads} bytes spill loads
ptxas info    : Used {registers} registers, used 1 barriers
"""
CODE = "wgmma.mma_async.sync.aligned.m64n256k16\ncp.async.cg.shared.global [%r1], [%rd2], 16;\n"


def report(code: str = CODE, **said: Any) -> Report:
    numbers: dict[str, Any] = {"frame": 0, "stores": 0, "loads": 0, "registers": 128} | said
    given = {"shared_bytes": 1000, "threads": 256, "must": {"wgmma", "cp.async"}, "seconds": 1.0}
    given |= {name: numbers.pop(name) for name in list(numbers) if name in given}
    log = numbers.pop("log", LOG.format(**numbers))
    return report_of("attend", log=log, code=code, **given)


def compile_kernels(*words: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own: in this one Triton interprets kernels instead."""
    return subprocess.run(
        [sys.executable, "-m", "launch", "bench", "compile", *words],
        capture_output=True,
        text=True,
        timeout=390,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_kernels_compile_for_hopper_without_a_fault():
    done = compile_kernels()
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    rooms = {kernel["title"].split(":")[0] for kernel in result["kernels"]}
    assert rooms == {"attention_mla", "moe", "ep", "runtime"}
    assert all(kernel["registers"] > 0 for kernel in result["kernels"])
    attend = [
        kernel for kernel in result["kernels"] if "attend" in kernel["title"] and " 16 heads" not in kernel["title"]
    ]
    assert len(attend) >= 6
    assert all(kernel["instructions"]["wgmma"] for kernel in attend)


def test_a_title_that_no_kernel_has_is_refused():
    done = compile_kernels("--only", "no such")
    assert (done.returncode, done.stdout) == (REFUSED, "")
    assert done.stderr == "serried: only is 'no such'; no kernel has that in its title, e.g. --only attend\n"


def test_a_kernel_as_it_should_be_has_no_faults():
    found = report()
    assert (found.faults, found.registers, found.spilled_bytes) == ([], 128, 0)
    assert found.instructions == {"wgmma": 1, "cp.async": 1, "tma": 0}


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"stores": 8, "loads": 12}, "20 bytes spilled"),
        ({"code": "cp.async.cg.shared"}, "no wgmma"),
        ({"code": "wgmma.mma_async cp.async.bulk.tensor"}, "no cp.async"),
        ({"shared_bytes": SHARED_LIMIT + 1}, f"{SHARED_LIMIT + 1} bytes of shared memory, more than {SHARED_LIMIT}"),
        ({"registers": 255, "threads": 512}, f"255 registers in 512 threads, more than {REGISTER_LIMIT}"),
        ({"log": "nothing"}, "the assembler said nothing of registers"),
    ],
)
def test_what_a_kernel_must_not_do_is_a_fault(said: dict[str, Any], fault: str):
    assert report(**said).faults == [fault]


def test_faults_reach_the_table_and_the_last_line():
    reports = [report(), report(stores=8)]
    assert summary(reports, CompileFlags())["faults"] == 1
    columns = {column.header: list(column.cells) for column in report_table(reports).columns}
    assert columns["spilled B"] == ["0", "8"]
    assert columns["wgmma"] == ["1", "1"]


def test_the_interpreter_is_no_compiler(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(Refusal, match="TRITON_INTERPRET is set"):
        run(CompileFlags())


@pytest.mark.parametrize(
    ("ops", "device", "told"), [("triton", "cpu", "1"), ("auto", "cpu", None), ("triton", "cuda", None)]
)
def test_kernels_on_a_cpu_are_interpreted_without_being_asked(
    ops: Literal["auto", "triton"], device: str, told: str | None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    prepare_kernels(EngineConfig(model="any", ops=ops, device=device))
    assert os.environ.get("TRITON_INTERPRET") == told

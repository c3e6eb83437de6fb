"""`serried serve` as a program over real gRPC: signals early and twice, and other launchers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from runtime import Engine, EngineConfig, SamplingParams
from runtime.settings.config import CacheConfig
from tests.launch.serving import PROGRAMS, ROOT, TINY
from tests.launch.test_groups import MPIRUN, TORCHRUN, mpirun

pytestmark = [pytest.mark.timeout(180), pytest.mark.slow]

PROMPTS = [[5 + number, 6, 7] for number in range(6)]
SERRIED = [sys.executable, "-m", "launch"]
LAUNCHERS = ("torchrun", "mpirun")
COUNT = 150
"""Tokens of the longest answers."""


@dataclass
class Program:
    """A server that runs. All it leaves in a temporary folder lies in `folder`/tmp."""

    process: subprocess.Popen[bytes]
    folder: Path

    @classmethod
    def start(cls, folder: Path, *words: str, command: Sequence[str] = SERRIED) -> Program:
        (folder / "tmp").mkdir()
        environ = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
        serve = [
            "serve",
            TINY,
            "--num-blocks",
            "128",
            "--port",
            "0",
            "--http-port",
            "0",
            "--log-format",
            "json",
            *words,
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *serve], cwd=ROOT, env=environ, stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        return cls(process, folder)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def address(self) -> str:
        """Where it listens, once it is ready."""
        until = time.monotonic() + 90.0
        while time.monotonic() < until and self.process.poll() is None:
            for line in self.log.splitlines():
                if line.startswith('{"time"') and json.loads(line)["text"].startswith("ready: "):
                    return json.loads(line)["grpc"]
            time.sleep(0.05)
        raise AssertionError(self.log)

    def family(self) -> list[psutil.Process]:
        """Its processes, also those whose parents are gone: they know its temporary folder."""
        mine = f"{self.folder}/tmp"
        return [one for one in psutil.process_iter() if one.pid != os.getpid() and temporary_folder(one) == mine]

    def wait_for_all(self, limit_s: float) -> int:
        """The exit code; nothing may be left after it."""
        code = self.process.wait(limit_s)
        _, left = psutil.wait_procs(self.family(), timeout=limit_s)
        assert not left, (left, self.log)
        return code

    def end(self) -> None:
        for one in [self.process, *self.family()]:
            one.kill()
        self.process.wait()


def temporary_folder(process: psutil.Process) -> str | None:
    try:
        return process.environ().get("TMPDIR")
    except psutil.Error:
        return None


def ask(address: str, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers to prompts that are asked at once."""
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        calls = [stub.Generate(request_of(prompt, max_tokens), timeout=90.0) for prompt in prompts]
        return [list(message.complete.output_ids) for call in calls for message in call]


def request_of(
    prompt: Sequence[int], max_tokens: int, *, stream: bool = False, logprobs: int | None = None
) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs)
    return pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=sampling, stream=stream)


@pytest.fixture(scope="module")
def truth() -> list[list[int]]:
    """What the engine alone says to PROMPTS, in float64."""
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    with Engine(EngineConfig(model=str(ROOT / TINY), dtype="float64", cache=CacheConfig(num_blocks=128))) as engine:
        return [list(output.token_ids) for output in engine.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Program]:
    words = ["--ranks", "2", "--dtype", "float64", "--drain-timeout-s", "100", "--slow-reader-timeout-s", "2"]
    program = Program.start(tmp_path_factory.mktemp("server"), *words)
    yield program
    program.end()


@dataclass
class Reader:
    """A client process that reads an answer; see programs/grpc_reader.py."""

    process: subprocess.Popen[bytes]
    heard: Path

    @classmethod
    def start(cls, heard: Path, address: str, request: pb.GenerateRequest, *options: str) -> Reader:
        program = [sys.executable, str(PROGRAMS / "grpc_reader.py"), address, request.SerializeToString().hex()]
        with heard.open("wb") as out:
            return cls(subprocess.Popen([*program, *options], stdout=out), heard)

    def wait_for_a_message(self) -> None:
        until = time.monotonic() + 90.0
        while b"\n" not in self.heard.read_bytes():
            assert time.monotonic() < until
            time.sleep(0.005)

    def answer(self) -> tuple[list[int], list[int] | None, dict[str, str]]:
        """Tokens of the messages, without a gap; those of the one that tells all, if it came; the status."""
        assert self.process.wait(100.0) == 0
        *messages, status = [json.loads(line) for line in self.heard.read_text().splitlines()]
        tokens: list[int] = []
        whole = None
        for message in messages:
            if "whole" in message:
                assert whole is None
                whole = message["whole"]
            else:
                assert message["offset"] == len(tokens)
                tokens += message["tokens"]
        return tokens, whole, status

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


def test_stopped_clients_hold_up_nobody_and_learn_how_their_requests_ended(
    server: Program, truth: list[list[int]], tmp_path: Path
):
    """Of two that are stopped, one's answer fits into the windows of its connection; the other's does not."""
    address = server.address()
    narrow = ["grpc.http2.bdp_probe=0", "grpc.http2.lookahead_bytes=1024"]
    asked = [request_of(prompt, COUNT, stream=True) for prompt in PROMPTS]
    asked[1] = request_of(PROMPTS[1], COUNT, stream=True, logprobs=20)
    readers = [
        Reader.start(tmp_path / str(place), address, one, *(narrow if place == 1 else ()))
        for place, one in enumerate(asked)
    ]
    try:
        for reader in readers[:2]:
            reader.wait_for_a_message()
            reader.process.send_signal(signal.SIGSTOP)
        for tokens, reader in zip(truth[2:], readers[2:], strict=True):
            assert reader.answer() == (tokens, tokens, {"status": "OK", "words": ""})
        wait_until_idle(address)
        assert ask(address, PROMPTS[2:3], 8) == [truth[2][:8]]
        for reader in readers[:2]:
            reader.process.send_signal(signal.SIGCONT)
        assert readers[0].answer() == (truth[0], truth[0], {"status": "OK", "words": ""})
        told, whole, status = readers[1].answer()
    finally:
        for reader in readers:
            reader.end()
    assert (told, whole) == (truth[1][: len(told)], None)
    assert 0 < len(told) < COUNT
    assert status["status"] == "RESOURCE_EXHAUSTED"
    assert "took nothing for 2 s" in status["words"]
    assert server.log.count("took nothing") == 1


def wait_until_idle(address: str) -> None:
    """Nothing is answered, and no page is taken."""
    until = time.monotonic() + 100.0
    with grpc.insecure_channel(address) as channel:
        stub = pb_grpc.VllmEngineStub(channel)
        while True:
            active = stub.GetServerInfo(pb.GetServerInfoRequest()).active_requests
            loads = stub.GetLoads(pb.GetLoadsRequest()).loads
            if not active and not any(load.num_used_tokens or load.num_running_reqs for load in loads):
                return
            assert time.monotonic() < until, (active, loads)
            time.sleep(0.1)


def test_a_second_signal_ends_what_runs_at_once_and_leaves_nothing(server: Program):
    """The last test of this server."""
    with grpc.insecure_channel(server.address()) as channel:
        call = pb_grpc.VllmEngineStub(channel).Generate(request_of([5], 1900, stream=True), timeout=90.0)
        next(call)
        server.process.send_signal(signal.SIGTERM)
        for _ in range(5):
            next(call)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        *_, last = call
    assert last.complete.finish_reason == "abort"
    assert server.wait_for_all(20.0) == 0
    assert not list((server.folder / "tmp").iterdir())


@pytest.mark.parametrize("after_s", [0.02, 0.15, 0.3, 0.5])
def test_a_signal_just_after_the_start_leaves_nothing(tmp_path: Path, after_s: float):
    """By the signal itself as long as there is no handler; in order from then on."""
    program = Program.start(tmp_path, "--ranks", "2")
    try:
        time.sleep(after_s)
        program.process.send_signal(signal.SIGTERM)
        assert program.wait_for_all(20.0) in (0, -signal.SIGTERM)
        assert not list((tmp_path / "tmp").iterdir())
    finally:
        program.end()


@pytest.mark.mpi
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_other_launchers_start_ranks_that_serve(tmp_path: Path, truth: list[list[int]], launcher: str):
    if launcher == "mpirun" and MPIRUN is None:
        pytest.skip("mpirun is not installed: pip install 'serried[mpi]'")
    start = (
        [*mpirun(2), *SERRIED]
        if launcher == "mpirun"
        else [TORCHRUN, "--standalone", "--nproc-per-node=2", "-m", "launch"]
    )
    transport = "mpi" if launcher == "mpirun" else "gloo"
    program = Program.start(tmp_path, "--dtype", "float64", "--transport", transport, command=start)
    try:
        address = program.address()
        assert f"{launcher}: rank 0 of 2" in program.log
        assert ask(address, PROMPTS[:2], 24) == [tokens[:24] for tokens in truth[:2]]
        [front] = [one for one in program.family() if "launch.service.front_door" in one.cmdline()]
        front.send_signal(signal.SIGTERM)
        assert program.wait_for_all(30.0) == 0, program.log
    finally:
        program.end()

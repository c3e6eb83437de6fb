import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch.service import openai_gateway
from launch.service.logs import Log
from launch.service.openai_gateway import Gateway, GatewayLost, find_program, gateway_words, quiet
from launch.service.serve_config import ServeConfig
from tests.launch.fake_group import info_of
from tests.launch.grpc_rig import until

pytestmark = pytest.mark.timeout(240)

STANDS_IN = """#!{python}
import os, signal, sys, time
with open({said!r}, "w") as file:
    print(*sys.argv[1:], file=file)
if {stubborn}:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
os.rename({said!r}, {said!r} + ".done")
time.sleep(60)
"""


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in the gateway's place, which writes its words to a file and waits."""

    def make(*, stubborn: bool = False) -> Path:
        program, said = tmp_path / "smg", tmp_path / "said"
        program.write_text(STANDS_IN.format(python=sys.executable, said=str(said), stubborn=stubborn))
        program.chmod(0o755)
        monkeypatch.setattr(openai_gateway, "find_program", lambda: str(program))
        return Path(f"{said}.done")

    return make


async def started(said: Path) -> Gateway:
    gateway = Gateway.start(ServeConfig(), info_of("folder"), port=1234, log=Log("text", stream=io.StringIO()))
    await until(said.exists)
    return gateway


def test_its_words_name_the_server_the_model_and_loopback():
    words = list(gateway_words(ServeConfig(), info_of("folder"), port=1234, http_port=8000, metrics_port=9000))
    asked = dict(zip(words[1::2], words[2::2], strict=True))
    assert words[0] == "launch"
    assert asked["--worker-urls"] == "grpc://127.0.0.1:1234"
    assert (asked["--host"], asked["--port"], asked["--model-path"]) == ("127.0.0.1", "8000", "folder")
    assert (asked["--prometheus-host"], asked["--prometheus-port"]) == ("127.0.0.1", "9000")


def test_it_runs_until_it_is_stopped(stand_in):
    async def body():
        gateway = await started(stand_in())
        gateway.check()
        await gateway.stop()
        with pytest.raises(GatewayLost, match="ended with code -15"):
            gateway.check()
        await gateway.stop()

    asyncio.run(body())


def test_one_that_does_not_end_is_killed(stand_in, monkeypatch):
    monkeypatch.setattr(openai_gateway, "STOP_S", 0.2)

    async def body():
        gateway = await started(stand_in(stubborn=True))
        await gateway.stop()
        with pytest.raises(GatewayLost, match="code -9"):
            gateway.check()

    asyncio.run(body())


def test_one_that_is_lost_is_missed(stand_in):
    async def body():
        gateway = await started(stand_in())
        os.kill(gateway._process.pid, signal.SIGKILL)
        gateway._process.wait()
        with pytest.raises(GatewayLost):
            gateway.check()

    asyncio.run(body())


def test_it_ends_when_the_server_is_killed(stand_in, tmp_path):
    """The server's part is played by a process that starts a gateway and says which."""
    said = stand_in()
    program = tmp_path / "server.py"
    program.write_text(
        "import os, subprocess, sys, time\n"
        "from launch.service.openai_gateway import tied_to_us\n"
        f"child = subprocess.Popen([*tied_to_us({str(tmp_path / 'smg')!r}), 'launch'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[3]
    with subprocess.Popen(
        [sys.executable, str(program)], stdout=subprocess.PIPE, env={"PYTHONPATH": str(root)}
    ) as server:
        pid = int(server.stdout.readline())
        asyncio.run(until(said.exists, within_s=50))
        server.kill()
    asyncio.run(until(lambda: not alive(pid), within_s=25))


def alive(pid: int) -> bool:
    """Whether there is such a process that has not ended; one that nobody waits for is a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_without_the_program_it_says_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match=r"smg is not installed; pip install 'serried\[openai\]'"):
        find_program()


def test_the_gateway_talks_to_this_machine_and_to_no_proxy():
    assert quiet({"HTTP_PROXY": "x", "https_proxy": "y", "HOME": "z"}) == {"HOME": "z"}

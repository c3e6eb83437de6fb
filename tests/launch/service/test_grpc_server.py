import asyncio
import io
import json
import os
import signal
import socket
import subprocess

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc as pb_grpc

from launch.front.front_client import Health
from launch.service.grpc_access import check_access
from launch.service.grpc_server import GroupFailed, Server, serve_grpc
from launch.service.logs import Log
from launch.service.openai_gateway import GatewayLost
from launch.service.serve_config import LimitsConfig, ServeConfig
from tests.launch.fake_group import FakeGroup
from tests.launch.grpc_rig import Served, generate, get, served, until

pytestmark = pytest.mark.timeout(120)
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def run():
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A server's and a client's certificate, each signed by itself, by the system's own program."""
    folder = tmp_path_factory.mktemp("tls")
    for name in ("server", "client"):
        words = f"openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN={name}"
        names = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
        files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")]
        subprocess.run([*words.split(), *names, *files], check=True, capture_output=True)
    return folder


MAPPED = "0000000000000000FFFF00000100007F"
"""127.0.0.1 as an address of IPv6, which gRPC prefers."""


def listening() -> set[tuple[str, str]]:
    """Sockets of this process that listen: address and inode."""
    inodes = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            inodes.add(os.readlink(f"/proc/self/fd/{number}"))
        except OSError:
            continue
    found = set()
    for table, size in (("/proc/net/tcp", 8), ("/proc/net/tcp6", 32)):
        with open(table) as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                    found.add((fields[1].split(":")[0][:size], fields[9]))
    return found


def test_it_listens_on_loopback_alone(run, tiny):
    async def body():
        before = listening()
        async with served(tiny):
            assert {address for address, _ in listening() - before} == {"0100007F", MAPPED}

    run(body())


def test_who_listens_elsewhere_without_encryption_is_warned(run, tiny):
    async def body():
        async with served(tiny, host="0.0.0.0") as one:
            assert "not encrypted" in one.log.getvalue()

    run(body())


def test_a_port_in_use_is_named(run, tiny):
    async def body():
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            port = holder.getsockname()[1]
            for ports in ({"port": port, "http_port": 0}, {"port": 0, "http_port": port}):
                config = ServeConfig(limits=LimitsConfig(), **ports)
                with pytest.raises(OSError, match=str(port)):
                    await serve_grpc(FakeGroup(tiny), config, log=Log("text", stream=io.StringIO()))

    run(body())


def test_without_the_secret_nothing_is_answered_but_health(run, tiny, tmp_path):
    secret = "s3cret-of-some-length"
    file = tmp_path / "token"
    file.write_text(f"{secret}\n")

    async def body():
        async with served(tiny, token_file=file) as one:
            for metadata in ((), (("authorization", f"Bearer {secret}x"),), (("authorization", secret),)):
                assert (await one.refused(generate(), metadata=metadata))[0] == Code.UNAUTHENTICATED
                error = await one.fails(one.stub.GetLoads(pb.GetLoadsRequest(), metadata=metadata))
                assert error.code() == Code.UNAUTHENTICATED
            twice = (("authorization", f"Bearer {secret}"), ("authorization", "Bearer x"))
            assert (await one.refused(generate(), metadata=twice))[0] == Code.UNAUTHENTICATED
            assert one.group.streams == []
            good = (("authorization", f"Bearer {secret}"),)
            assert len(await one.ask(generate(), metadata=good)) == 5
            await health_pb2_grpc.HealthStub(one.channel).Check(health_pb2.HealthCheckRequest())

    run(body())


def test_a_secret_that_is_no_secret_is_refused(run, tiny, tmp_path):
    (tmp_path / "token").write_text("short\n")
    config = ServeConfig(limits=LimitsConfig(), port=0, token_file=tmp_path / "token")

    async def body():
        with pytest.raises(ValueError, match="with 5 bytes; it must hold at least 16"):
            Server(FakeGroup(tiny), config, Log("text"))

    run(body())


def test_files_are_looked_at_before_anything_starts(certificates, tmp_path):
    good = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    check_access(ServeConfig())
    check_access(ServeConfig(**good, tls_client_ca=certificates / "client.pem"))
    with pytest.raises(ValueError, match="are not PEM files that fit"):
        check_access(ServeConfig(**good | {"tls_key": certificates / "client.key"}))
    with pytest.raises(ValueError, match="are not PEM files that fit"):
        check_access(ServeConfig(**good, tls_client_ca=certificates / "client.key"))
    for missing in ({"token_file": tmp_path / "x"}, good | {"tls_cert": tmp_path / "x"}):
        with pytest.raises(OSError, match="No such file"):
            check_access(ServeConfig(**missing))


@pytest.mark.parametrize("mutual", [False, True])
def test_over_tls_only_those_with_the_right_certificate_get_in(run, tiny, certificates, mutual):
    read = {path.name: path.read_bytes() for path in certificates.iterdir()}
    how = {"tls_cert": certificates / "server.pem", "tls_key": certificates / "server.key"}
    if mutual:
        how["tls_client_ca"] = certificates / "client.pem"

    async def outcome(server: Server, credentials: grpc.ChannelCredentials | None) -> str:
        address = f"localhost:{server.port}"
        channel = (
            grpc.aio.insecure_channel(address) if credentials is None else grpc.aio.secure_channel(address, credentials)
        )
        async with channel:
            try:
                stub = pb_grpc.VllmEngineStub(channel)
                return str(len([m async for m in stub.Generate(generate(), timeout=25)]))
            except grpc.aio.AioRpcError as error:
                return error.code().name

    async def body():
        async with served(tiny, **how) as one:
            anybody = grpc.ssl_channel_credentials(read["server.pem"])
            known = grpc.ssl_channel_credentials(read["server.pem"], read["client.key"], read["client.pem"])
            stranger = grpc.ssl_channel_credentials(read["server.pem"], read["server.key"], read["server.pem"])
            assert await outcome(one.server, known) == "5"
            assert await outcome(one.server, None) == "UNAVAILABLE"
            assert await outcome(one.server, anybody) == ("UNAVAILABLE" if mutual else "5")
            if mutual:
                assert await outcome(one.server, stranger) == "UNAVAILABLE"

    run(body())


async def ports_of(log: io.StringIO) -> tuple[str, int]:
    """Where a server says that it is ready."""
    await until(lambda: '"ready: ' in log.getvalue())
    [line] = [line for line in log.getvalue().splitlines() if '"ready: ' in line]
    said = json.loads(line)
    return said["grpc"], int(said["http"].rpartition(":")[2])


def start(group: FakeGroup, log: io.StringIO, **changes) -> asyncio.Task[None]:
    config = ServeConfig(limits=LimitsConfig(), port=0, http_port=0, **changes)
    return asyncio.create_task(serve_grpc(group, config, log=Log("json", stream=log)))


def test_sigterm_lets_what_runs_come_to_its_end(run, tiny):
    async def body():
        group, log = FakeGroup(tiny), io.StringIO()
        group.held = True
        serving = start(group, log, drain_timeout_s=7.0)
        address, _ = await ports_of(log)
        async with grpc.aio.insecure_channel(address) as channel:
            one = Served(None, group, channel, log)  # type: ignore[arg-type]
            asking = asyncio.create_task(one.ask(generate()))
            await until(lambda: group.streams)

            async def drain(timeout_s: float) -> bool:
                group.drained.append(timeout_s)
                group.held = False
                await until(lambda: not group.streams[0].have)
                return True

            group.drain = drain  # type: ignore[method-assign]
            os.kill(os.getpid(), signal.SIGTERM)
            assert len(await asking) == 5
            await serving
        assert group.drained == [7.0]
        assert '"drained"' in log.getvalue()

    run(body())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_aborts_what_still_runs(run, tiny, number):
    async def body():
        group, log = FakeGroup(tiny), io.StringIO()
        serving = start(group, log, drain_timeout_s=700.0)
        await ports_of(log)

        async def drain(timeout_s: float) -> bool:
            group.drained.append(timeout_s)
            await asyncio.sleep(timeout_s)
            return False

        group.drain = drain  # type: ignore[method-assign]
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: group.drained)
        assert not serving.done()
        os.kill(os.getpid(), number)
        await asyncio.wait_for(serving, 5.0)
        assert group.drained == [700.0, 0.0]
        assert "aborted what was left" in log.getvalue()

    run(body())


def test_it_can_be_stopped_before_the_ranks_are_ready(run, tiny):
    async def body():
        group, log = FakeGroup(tiny), io.StringIO()
        group.ready.clear()
        before = signal.getsignal(signal.SIGTERM)
        serving = start(group, log)
        await until(lambda: signal.getsignal(signal.SIGTERM) != before)
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        assert group.drained == []

    run(body())


def test_when_the_group_fails_everybody_hears_of_whom_before_the_server_ends(run, tiny, monkeypatch):
    monkeypatch.setattr("launch.service.grpc_server.LAST_WORDS_S", 0.4)

    async def body():
        group, log = FakeGroup(tiny), io.StringIO()
        serving = start(group, log)
        address, http_port = await ports_of(log)
        async with grpc.aio.insecure_channel(address) as channel:
            group.fail("rank 1 was killed at step 7")
            await until(lambda: '"level": "error"' in log.getvalue())
            said = await pb_grpc.VllmEngineStub(channel).HealthCheck(pb.HealthCheckRequest())
            assert (said.healthy, said.message) == (False, "rank 1 was killed at step 7")
            status, page = await get(http_port, "/health")
            assert (status, json.loads(page)["words"]) == (503, "rank 1 was killed at step 7")
            with pytest.raises(GroupFailed, match="rank 1 was killed at step 7"):
                await serving

    run(body())


def test_a_lost_gateway_ends_the_server_after_what_runs(run, tiny, monkeypatch):
    class Lost:
        @classmethod
        def start(cls, *args, **how):
            return cls()

        def check(self):
            raise GatewayLost("the gateway smg ended with code -9")

        async def stop(self):
            pass

    async def body():
        monkeypatch.setattr("launch.service.grpc_server.Gateway", Lost)
        group = FakeGroup(tiny)
        serving = start(group, io.StringIO(), openai=True)
        with pytest.raises(GatewayLost):
            await serving
        assert group.drained == [60.0]

    run(body())


def test_live_started_ready_and_healthy_are_four_answers(run, tiny):
    async def body():
        group = FakeGroup(tiny)
        group.ready.clear()
        group.state = Health(state="starting")
        async with served(tiny, group=group) as one:

            async def answers() -> list[int]:
                paths = ("/live", "/started", "/ready", "/health")
                return [(await get(one.server.http_port, path))[0] for path in paths]

            assert await answers() == [200, 503, 503, 503]
            group.state = Health(state="ready", last_step_age_s=0.0)
            assert await answers() == [200, 200, 200, 200]
            group.state = Health(state="draining", last_step_age_s=0.0)
            assert await answers() == [200, 200, 503, 200]
            group.state = Health(state="ready", last_step_age_s=100.0)
            assert await answers() == [200, 200, 503, 503]  # stalled: four requests, no step
            group.state = Health(state="failed", culprit="rank 0")
            assert await answers() == [200, 200, 503, 503]

    run(body())


def test_pings_of_a_gateway_do_not_close_its_connection(run, tiny):
    async def body():
        async with served(tiny) as one:
            options = [
                ("grpc.keepalive_time_ms", 1000), ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_pings_without_data", 0), ("grpc.use_local_subchannel_pool", 1),
            ]  # fmt: skip
            async with grpc.aio.insecure_channel(f"127.0.0.1:{one.server.port}", options=options) as channel:
                one.group.held = True
                call = pb_grpc.VllmEngineStub(channel).Generate(generate())
                await asyncio.sleep(4.5)
                one.group.held = False
                assert len([m async for m in call]) == 5

    run(body())

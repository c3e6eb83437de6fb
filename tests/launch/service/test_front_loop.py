import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from launch.service import front_loop
from launch.service.front_loop import PATIENCE, new_loop, patient_threads, run_loop

ROOT = Path(__file__).resolve().parents[3]

linux = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH")

ONE_SERVER = """
import asyncio, os
from launch.service.grpc_server import Server
from launch.service.logs import Log
from launch.service.serve_config import ServeConfig
from tests.launch.fake_group import FakeGroup

async def main():
    server = Server(FakeGroup("m"), ServeConfig(port=0, http_port=0), Log("text"))
    await server.listen()
    print(sum(os.sched_getscheduler(int(task)) == os.SCHED_BATCH for task in os.listdir("/proc/self/task")))
    await server.close()

asyncio.run(main())
"""


def test_it_is_libuvs_where_that_is_installed():
    uvloop = pytest.importorskip("uvloop")

    async def body():
        return type(asyncio.get_running_loop())

    assert run_loop(body()) is uvloop.Loop


def test_without_it_asyncios_own_serves(monkeypatch):
    monkeypatch.setattr(front_loop, "find_spec", lambda name: None)
    loop = new_loop()
    loop.close()
    assert type(loop).__module__.startswith("asyncio.")


@linux
def test_threads_that_start_in_here_are_patient_and_no_others():
    end = threading.Event()

    def started() -> threading.Thread:
        thread = threading.Thread(target=end.wait)
        thread.start()
        return thread

    def manner(thread: threading.Thread) -> tuple[int, int]:
        assert thread.native_id is not None
        return os.sched_getscheduler(thread.native_id), os.getpriority(os.PRIO_PROCESS, thread.native_id)

    before = started()
    with patient_threads():
        inside = started()
    after = started()
    usual = manner(before)
    try:
        assert manner(inside) == (os.SCHED_BATCH, min(usual[1] + PATIENCE, 19))
        assert manner(after) == usual == manner(threading.main_thread())
    finally:
        end.set()
        for thread in (before, inside, after):
            thread.join()


@linux
def test_a_servers_one_thread_of_grpcs_for_the_loop_is_patient():
    """In a process of its own: all servers and clients of a process share it."""
    done = subprocess.run(
        [sys.executable, "-c", ONE_SERVER], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True
    )
    assert done.stdout == "1\n"

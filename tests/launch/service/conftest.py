"""A server over a scripted group for a test's body, all of a module in one event loop."""

import asyncio

import pytest

from tests.launch.grpc_rig import served


@pytest.fixture(scope="module")
def run():
    """One event loop for all: gRPC's threads are bound to the first they meet."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture
def on(run, tiny):
    """Run a test's body with a server over a fake group."""

    def start(body, **how):
        async def whole():
            async with served(tiny, **how) as one:
                await body(one)

        run(whole())

    return start

"""What all tests need of the process they run in."""

import fcntl
import os
import signal
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from tests.alone import floor

# Most tests' tensors are tiny, and a test's ranks share its cores as it is.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as the command line does it
if not torch.cuda.is_available():
    # Read when triton is imported, which some library may do: without a GPU, kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """A job in the background inherits Ctrl-C ignored, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Of the processes of `pytest -n`, one that comes to a test marked `alone` waits for the others, and they for it.

    It waits out here, where neither the time-out nor the duration of a test counts it.
    """
    if not hasattr(item.config, "workerinput"):
        return (yield)
    with floor(Path(__file__), fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH):
        return (yield)

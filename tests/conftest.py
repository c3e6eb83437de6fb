"""What all tests need of the process they run in."""

import os
import signal

import torch

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as the command line does it
if not torch.cuda.is_available():
    # Read when triton is imported, which some library may do: without a GPU, kernels run in Triton's interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """A job in the background inherits Ctrl-C ignored, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

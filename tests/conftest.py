"""What all tests need of the process they run in."""

import signal


def pytest_configure() -> None:
    """A job in the background inherits Ctrl-C ignored, and so would every program that a test starts and interrupts."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

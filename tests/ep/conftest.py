"""What the tests of ep share: one torch thread, and a group that collects every rank's error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from ep import ThreadTransport, run_ranks

LIMIT_S = 20.0


@pytest.fixture(autouse=True)
def _one_torch_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def errors_of():
    """errors_of(size, fn) runs fn on all ranks and returns what each raised (None: nothing) and what came out."""

    def run(size: int, fn: Callable[[ThreadTransport], object]) -> tuple[list[BaseException | None], BaseException]:
        errors: list[BaseException | None] = [None] * size

        def record(transport: ThreadTransport) -> None:
            try:
                fn(transport)
            except BaseException as error:
                errors[transport.rank] = error
                raise

        with pytest.raises(BaseException) as raised:  # noqa: PT011  # the tests say which
            run_ranks(size, record, timeout_s=LIMIT_S)
        return errors, raised.value

    return run

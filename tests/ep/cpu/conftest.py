"""Fixtures of kernels for a processor."""

from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture
def torch_threads_are() -> Iterator[Callable[[int], None]]:
    """Sets how many threads torch's operations and kernels use in this test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)

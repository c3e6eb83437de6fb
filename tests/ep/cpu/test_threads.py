"""Torch's threads become the kernels', in one Python thread and for a while."""

import threading
from collections.abc import Callable

import torch

from ep.cpu.threads import kernel_threads, num_threads, torch_threads


def seen_by_another() -> tuple[int, int]:
    seen: list[tuple[int, int]] = []
    thread = threading.Thread(target=lambda: seen.append((num_threads(), torch.get_num_threads())), daemon=True)
    thread.start()
    thread.join(10)
    return seen[0]


def test_torch_is_left_with_one_thread_while_kernels_have_all(torch_threads_are: Callable[[int], None]):
    torch_threads_are(3)
    assert (num_threads(), torch.get_num_threads()) == (3, 3)
    with kernel_threads():
        assert (num_threads(), torch.get_num_threads()) == (3, 1)
        assert seen_by_another() == (3, 3)
        with torch_threads():
            assert (num_threads(), torch.get_num_threads()) == (3, 3)
        assert (num_threads(), torch.get_num_threads()) == (3, 1)
        with kernel_threads():
            assert (num_threads(), torch.get_num_threads()) == (3, 1)
        assert (num_threads(), torch.get_num_threads()) == (3, 1)
    assert (num_threads(), torch.get_num_threads()) == (3, 3)

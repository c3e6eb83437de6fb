"""Whose kernels run is settled before anything is built, and what cannot be is refused in words."""

import pytest
import torch

from runtime.settings import kernel_choice
from runtime.settings.kernel_choice import choose_ops

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "dtype", "page_size", "chosen"),
    [
        (CPU, torch.float32, 64, "reference"),
        (CUDA, torch.bfloat16, 64, "triton"),
        (CUDA, torch.float64, 64, "reference"),
        (CUDA, torch.bfloat16, 24, "reference"),
    ],
)
def test_auto_takes_kernels_where_they_can_run(device: torch.device, dtype: torch.dtype, page_size: int, chosen: str):
    assert choose_ops("auto", device=device, dtype=dtype, page_size=page_size) == chosen


@pytest.mark.parametrize(
    ("device", "dtype", "has_it", "chosen"),
    [
        (CPU, torch.bfloat16, True, "numba"),
        (CPU, torch.bfloat16, False, "reference"),
        (CPU, torch.float16, True, "reference"),
        (CPU, torch.float64, True, "reference"),
        (CUDA, torch.bfloat16, True, "triton"),
    ],
)
def test_auto_takes_numba_s_kernels_for_bf16_on_a_processor(
    device: torch.device, dtype: torch.dtype, has_it: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel_choice, "has_numba", lambda: has_it)
    assert choose_ops("auto", device=device, dtype=dtype, page_size=64) == chosen


@pytest.mark.parametrize(
    ("device", "dtype", "has_it", "message"),
    [
        (CUDA, torch.bfloat16, True, "on device 'cuda'; its kernels are for a CPU"),
        (CPU, torch.float32, True, "its kernels are for bfloat16, e.g. --ops reference"),
        (CPU, torch.bfloat16, False, "it needs the package numba: pip install numba"),
    ],
)
def test_numba_s_kernels_where_they_cannot_be_are_refused(
    device: torch.device, dtype: torch.dtype, has_it: bool, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel_choice, "has_numba", lambda: has_it)
    with pytest.raises(ValueError, match=message):
        choose_ops("numba", device=device, dtype=dtype, page_size=64)


@pytest.mark.parametrize("name", ["reference", "triton"])
def test_what_a_user_asks_for_stays(name: str):
    assert choose_ops(name, device=CUDA, dtype=torch.bfloat16, page_size=16) == name


@pytest.mark.parametrize(
    ("dtype", "page_size", "interpreted", "message"),
    [
        (torch.float64, 64, True, r"dtype float64; kernels go up to float32, e.g. --dtype float32"),
        (torch.float32, 24, True, r"block_size is 24; with ops triton it must be a multiple of 16, e.g. 64"),
        (torch.float32, 64, False, r"set TRITON_INTERPRET=1 before Python starts, or choose ops reference"),
    ],
)
def test_kernels_that_cannot_run_are_refused(
    dtype: torch.dtype, page_size: int, interpreted: bool, message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(kernel_choice, "interpreted", lambda: interpreted)
    with pytest.raises(ValueError, match=message):
        choose_ops("triton", device=CPU, dtype=dtype, page_size=page_size)

"""Matmuls with packed weights against the same products in float64; a row's bits whatever it is multiplied with."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from ep.cpu.calls import kernel
from ep.cpu.language import claim, floats, longs
from ep.cpu.matmul import linear, logits, multiply
from ep.cpu.panels import Packed, pack, pack_gated, packed_bytes
from ep.cpu.tile import MULTIPLIES_PAIRS, ROWS, tile_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def assert_rounded(found: Tensor, truth: Tensor) -> None:
    """Within one rounding to 8 bits of the largest value."""
    assert found.dtype == torch.bfloat16
    assert found.shape == truth.shape
    assert float((found.double() - truth).abs().max()) <= 2**-8 * float(truth.abs().max())


SIZES = [(1, 40, 70), (2, 64, 32), (5, 41, 70), (8, 128, 96), (33, 40, 7), (33, 1, 1), (7, 2, 33)]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_a_linear_layer(
    num_rows: int, num_inputs: int, num_outputs: int, threads: int, torch_threads_are: Callable[[int], None]
):
    torch_threads_are(threads)
    x, weight = drawn(num_rows, num_inputs), drawn(num_outputs, num_inputs, seed=1)
    assert_rounded(linear(x, pack(weight)), x.double() @ weight.double().T)


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_a_gated_pair_is_multiplied_at_once(num_rows: int, num_inputs: int, num_outputs: int):
    x, gate_up = drawn(num_rows, num_inputs), drawn(2 * num_outputs, num_inputs, seed=1)
    gate, up = (x.double() @ gate_up.double().T).bfloat16().double().chunk(2, dim=1)
    assert_rounded(linear(x, pack_gated(gate_up)), functional.silu(gate) * up)


@pytest.mark.parametrize(("num_rows", "num_inputs", "num_outputs"), SIZES)
def test_logits_are_not_rounded(num_rows: int, num_inputs: int, num_outputs: int):
    x, weight = drawn(num_rows, num_inputs), drawn(num_outputs, num_inputs, seed=1)
    found = logits(x, pack(weight))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_no_rows_give_no_rows():
    assert linear(drawn(0, 40), pack(drawn(70, 40))).shape == (0, 70)


def test_rows_may_be_columns_of_something_wider():
    wide = drawn(5, 60)
    wide[:, :13] = torch.nan
    wide[:, 53:] = torch.nan
    weight = drawn(70, 40, seed=1)
    assert_rounded(linear(wide[:, 13:53], pack(weight)), wide[:, 13:53].double() @ weight.double().T)


def test_a_row_has_the_same_bits_whatever_it_is_multiplied_with():
    x, packed = drawn(3 * ROWS + 5, 96), pack(drawn(80, 96, seed=1))
    together = linear(x, packed)
    for first in range(x.shape[0]):
        for some in (1, 3, ROWS):
            assert torch.equal(linear(x[first : first + some], packed), together[first : first + some])


def test_groups_multiply_all_their_rows():
    x_GTK, weights = drawn(3, 9, 40), [drawn(50, 40, seed=seed) for seed in (1, 2, 3)]
    out_TGN = torch.full((9, 3, 50), torch.nan).bfloat16()
    multiply(x_GTK, pack(*weights), out_TGN.transpose(0, 1))
    truth = torch.stack([x.double() @ weight.double().T for x, weight in zip(x_GTK, weights, strict=True)], dim=1)
    assert_rounded(out_TGN, truth)


@pytest.mark.parametrize("threads", [1, 2])
def test_groups_fill_their_places_from_the_rows_that_are_named(threads: int, torch_threads_are: Callable[[int], None]):
    torch_threads_are(threads)
    x, weights = drawn(6, 40), [drawn(50, 40, seed=seed) for seed in (1, 2, 3)]
    starts, rows = torch.tensor([1, 4, 4, 14]), torch.tensor([9, 0, 5, 5, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 9])
    out = torch.full((15, 50), -7.0).bfloat16()
    multiply(x.unsqueeze(0), pack(*weights), out.unsqueeze(0), starts_G=starts, rows_M=rows)
    asked = x[rows[1:14]].double()
    truth = torch.cat((asked[:3] @ weights[0].double().T, asked[3:] @ weights[2].double().T))
    assert_rounded(out[1:14], truth)
    assert bool((out[[0, 14]] == -7.0).all())


def test_what_was_packed_is_a_copy_and_takes_the_bytes_that_are_said():
    weight, x = drawn(70, 41, seed=1), drawn(3, 41)
    packed = pack(weight)
    before = linear(x, packed)
    weight.zero_()
    assert torch.equal(linear(x, packed), before)
    assert packed.panels_PKN.nbytes == packed_bytes(70, 41)
    assert pack_gated(drawn(70, 41)).panels_PKN.nbytes == packed_bytes(35, 41, gated=True)


def test_a_group_is_filled_anew_and_the_others_stay():
    x, weights = drawn(2, 4, 40), [drawn(50, 40, seed=seed) for seed in (1, 2, 3)]
    packed, out = pack(*weights[:2]), torch.empty(2, 4, 50).bfloat16()
    packed.fill(1, weights[2])
    multiply(x, packed, out)
    assert_rounded(out, torch.stack([x[0].double() @ weights[0].double().T, x[1].double() @ weights[2].double().T]))


def test_other_formats_are_not_packed():
    with pytest.raises(AssertionError, match="float32 where bfloat16 is packed"):
        pack(torch.zeros(4, 4))


def test_sizes_that_do_not_go_together_are_refused():
    with pytest.raises(AssertionError, match="rows of 42 for weights of 40 inputs"):
        linear(drawn(1, 42), pack(drawn(8, 40)))
    with pytest.raises(AssertionError):
        multiply(drawn(3, 1, 40), Packed.empty(2, 8, 40), drawn(3, 1, 8))


@pytest.mark.parametrize("multiplies_pairs", [False, True])
def test_tiles_for_either_kind_of_processor(multiplies_pairs: bool):
    if multiplies_pairs and not MULTIPLIES_PAIRS:
        pytest.skip("this processor does not multiply pairs of bfloat16")
    tile: Any = tile_of(multiplies_pairs=multiplies_pairs)

    @kernel()
    def run(args):
        if claim(args) < args[1]:
            addresses = np.empty(12, np.int64)
            for m in range(args[2]):
                addresses[m] = longs(args[3])[m]
            sums = np.empty(12 * 32, np.float32)
            tile(args[2], addresses.ctypes.data, args[4], args[5], sums.ctypes.data)
            for place in range(args[2] * 32):
                floats(args[6])[place] = sums[place]

    x, weight = drawn(12, 70), drawn(32, 70, seed=1)
    packed, truth = pack(weight), x.double() @ weight.double().T
    addresses = torch.tensor([x[m].data_ptr() for m in range(12)])
    for num_rows in range(1, 13):
        out = torch.empty(num_rows, 32)
        run(1, num_rows, addresses.data_ptr(), packed.panels_PKN.data_ptr(), 35, out.data_ptr())
        torch.testing.assert_close(out.double(), truth[:num_rows], rtol=1e-4, atol=1e-4)

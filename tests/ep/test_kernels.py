"""Places, packing and sums in Triton's interpreter against torch, bit for bit."""

import pytest
import torch
from torch import Tensor

from ep.kernels import add_rows, find_places, pack
from ep.ops import ReferenceOps, TritonOps
from ep.places import RowPlaces, row_places
from ep.rows import RowFormat, Rows
from ep.sums import Sums, add

pytestmark = pytest.mark.interpret
EXAMPLE = torch.tensor([[0, 3], [2, 3], [-1, 1]])


def assert_same_places(found: RowPlaces, expected: RowPlaces) -> None:
    for name in RowPlaces._fields:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def both_places(slots_TK: Tensor, **sizes: int) -> RowPlaces:
    """The kernel's, into memory full of rubbish, and torch's must be the same."""
    expected = row_places(slots_TK, **sizes)
    found = RowPlaces(*(torch.full_like(values, 77) for values in expected))
    found.overflow.zero_()
    sizes.pop("num_members")
    find_places(slots_TK, found, **sizes)
    assert_same_places(found, expected)
    return found


def test_the_docstrings_rows_find_their_places():
    places = both_places(EXAMPLE, slots_per_member=2, num_members=2, capacity=2)
    assert places.rows_P.tolist() == [3, 0, 2, 3, 0, 1]
    assert places.counts_R.tolist() == [2, 2]
    assert places.back_TJ.tolist() == [[1, 4], [5, -1], [2, -1]]
    assert not places.overflow


@pytest.mark.parametrize("capacity", [1, 30, 300])
@pytest.mark.parametrize(("num_rows", "top_k", "num_members"), [(0, 2, 2), (1, 1, 1), (140, 3, 5), (9, 8, 3)])
def test_places_of_any_sizes_are_those_of_torch(num_rows, top_k, num_members, capacity):
    """More rows than are looked at together, members with none, the same slot twice, slots that are none."""
    noise = torch.Generator().manual_seed(num_rows + capacity)
    slots_TK = torch.randint(-1, 4 * num_members, (num_rows, top_k), generator=noise)
    both_places(slots_TK, slots_per_member=4, num_members=num_members, capacity=capacity)


def test_all_rows_to_one_member_overflow_there_only():
    places = both_places(torch.full((130, 2), 5), slots_per_member=2, num_members=3, capacity=129)
    assert places.counts_R.tolist() == [0, 0, 129]
    assert places.overflow
    assert places.back_TJ[129].tolist() == [-1, -1]


@pytest.mark.parametrize("hidden_bytes", [16, 6, 40000])
@pytest.mark.parametrize("order", [[], [2], [3, 0, 2, 2, 3, 1], [3] * 5])
def test_packed_rows_are_those_of_torch(hidden_bytes, order):
    """Number 3 is no row: its place gets slots of -1, and nothing else is touched."""
    row = RowFormat(2, torch.float32, hidden_bytes)
    noise = torch.Generator().manual_seed(hidden_bytes)
    num_words = hidden_bytes // row.word.itemsize
    rows = Rows(
        torch.arange(3) + 5, EXAMPLE, torch.rand(3, 2, generator=noise),
        torch.randint(0, 100, (3, num_words), generator=noise).to(row.word),
    )  # fmt: skip
    order_N = torch.tensor(order, dtype=torch.int64)
    found, expected = (torch.full((len(order), row.num_bytes), 0x7F, dtype=torch.uint8) for _ in range(2))
    pack(row, rows, order_N, found)
    ReferenceOps().pack(row, rows, order_N, expected)
    real = order_N < 3
    for name, ours, theirs in zip(Rows._fields, row.fields(found), row.fields(expected), strict=True):
        assert torch.equal(ours[real], theirs[real]), name
    fields = row.fields(found)
    assert torch.equal(fields.slots_NK, row.fields(expected).slots_NK)
    assert (found[~real][:, :8] == 0x7F).all()
    assert (fields.values_NX[~real] == row.fields(torch.full_like(found, 0x7F)).values_NX[~real]).all()


def test_the_docstrings_rows_are_added():
    sums = Sums(
        torch.tensor([[1.0], [2.0], [4.0]]),
        torch.tensor([[2, 0], [-1, 1], [-1, -1]]),
        torch.tensor([[10.0, 1.0], [5.0, 0.5], [0.0, 0.0]]),
    )
    for adding in (add, lambda sums, out: add_rows(sums, out, zeros=True)):
        out_ND = torch.full((3, 1), torch.nan)
        adding(sums, out_ND)
        assert out_ND.flatten().tolist() == [41.0, 1.0, 0.0]


@pytest.mark.parametrize("is_weighed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("num_out", "width"), [(0, 4), (1, 1), (19, 50), (2, 1100)])
def test_sums_are_those_of_torch(num_out, width, dtype, is_weighed):
    """Rows that nobody asks for are NaN; results without rows are zeros, or stay what they were."""
    noise = torch.Generator().manual_seed(width)
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    rows_MD = torch.randn(7, width, generator=noise).to(dtype)
    rows_MD[3] = torch.nan
    index_NJ = torch.tensor([-1, 0, 1, 2, 4, 5, 6])[torch.randint(0, 7, (num_out, 3), generator=noise)]
    index_NJ[::2] = -1
    weights_NJ = torch.rand(num_out, 3, generator=noise, dtype=wide) if is_weighed else None
    sums = Sums(rows_MD, index_NJ, weights_NJ)
    expected = torch.empty(num_out, width, dtype=dtype)
    add(sums, expected)
    for zeros in (True, False):
        found = torch.full((num_out, width), torch.nan, dtype=dtype)
        add_rows(sums, found, zeros=zeros)
        nothing = (index_NJ < 0).all(1)
        assert torch.equal(found[~nothing], expected[~nothing])
        assert (found[nothing] == 0).all() if zeros else found[nothing].isnan().all()


def test_sums_go_between_other_fields_of_a_row():
    sums = Sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[0, 1]]))
    wide = torch.full((1, 6), torch.nan)
    add_rows(sums, wide[:, 2:4], zeros=True)
    assert wide[0, 2:4].tolist() == [4.0, 6.0]
    assert wide[0, [0, 1, 4, 5]].isnan().all()


def test_ops_give_the_same_places():
    sizes = {"slots_per_member": 2, "num_members": 2, "capacity": 1}
    assert_same_places(TritonOps().find_places(EXAMPLE, **sizes), ReferenceOps().find_places(EXAMPLE, **sizes))

"""How close a kernel's rows must be to the truth in float64."""

from torch import Tensor

MOST_ULPS = 2.0


def assert_close_rows(found_ND: Tensor, truth_ND: Tensor, *, most_cosine: float) -> None:
    """Cosine distance of all rows together, and no element off by more than 2 bfloat16 units in the last place of its
    row's largest magnitude (bfloat16 has 8 bits: 2 ** (exponent - 7))."""
    assert found_ND.shape == truth_ND.shape, (found_ND.shape, truth_ND.shape)
    if found_ND.numel() == 0:
        return
    found_ND, truth_ND = found_ND.double(), truth_ND.double()
    cosine = 1 - (found_ND * truth_ND).sum() / (found_ND.norm() * truth_ND.norm())
    assert cosine.abs() < most_cosine, f"cosine distance {cosine:.3g}, allowed {most_cosine:.3g}"
    unit_N1 = 2.0 ** (truth_ND.abs().amax(dim=1, keepdim=True).log2().floor() - 7)
    off_ND = (found_ND - truth_ND).abs() / unit_N1
    worst = int(off_ND.argmax())
    row, column = divmod(worst, found_ND.shape[1])
    assert off_ND.flatten()[worst] <= MOST_ULPS, (
        f"row {row}, column {column}: {found_ND[row, column]:.6g}, not {truth_ND[row, column]:.6g}, "
        f"off by {off_ND[row, column]:.3g} units"
    )

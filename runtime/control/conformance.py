"""What any control plane must do. All ranks call the check together; AssertionError says what differs.

Rows follow from rank and sequence, so every rank predicts the whole matrix.
"""

from __future__ import annotations

from .control import Control


def check_control(control: Control, *, width: int, sequence: int = 0) -> int:
    """Put one rank's end of a control plane for rows of `width` through its paces; the next free sequence number."""

    def row(rank: int, number: int) -> list[int]:
        return [(-1) ** place * ((rank + 1) << (40 - place % 40)) + number for place in range(width)]

    def matrix(number: int) -> list[list[int]]:
        return [row(rank, number) for rank in range(control.size)]

    for number in range(sequence, sequence + 5):
        found = control.gather(row(control.rank, number), sequence=number).wait()
        assert found == matrix(number), f"gather {number} on rank {control.rank}: {found}, expected {matrix(number)}"
    numbers = range(sequence + 5, sequence + 9)
    under_way = [(number, control.gather(row(control.rank, number), sequence=number)) for number in numbers]
    for number, rows in reversed(under_way):
        found = rows.wait()
        assert found == matrix(number), f"gather {number} of several on rank {control.rank}: {found}"
        assert rows.wait() is found, "a second wait returns the same"
    edges = [-(1 << 63), (1 << 63) - 1] * width
    found = control.gather(edges[:width], sequence=sequence + 9).wait()
    assert found == [edges[:width]] * control.size, f"the ends of 64 bits: {found}"
    return sequence + 10

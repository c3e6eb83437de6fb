"""Which sizes of steps are captured, as a user may set it, and which size a step is taken to. Pure.

decode sizes   1, 2, 4, then by 8 to 256, by 16 to 512      one graph for the whole step
piece sizes    64, 128, 256 .. up to a step's tokens        where some rank computes prompts: graphs of what lies
                                                            between attentions
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..scheduling.cadence import Reason
from ..scheduling.heartbeat import StepPlan

USUAL_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
LEAST_PIECE = 64
WITHOUT_PROMPTS = (Reason.NO_PROMPTS, Reason.DEFERRED, Reason.HALTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphConfig:
    """What is captured on a GPU."""

    enforce_eager: bool = False
    """Launch every kernel by itself instead of replaying CUDA graphs; a CPU always does."""

    cuda_graph_sizes: tuple[int, ...] = ()
    """Tokens of the decode steps that are captured; unset: 1, 2, 4, by 8 to 256, by 16 to 512, as far as
    --max-num-seqs goes. A step takes the next larger one."""

    debug_sync: bool = False
    """End the run when a warm step makes the host wait for the GPU, allocates memory, compiles a kernel or opens a
    communicator, and say what."""

    def __post_init__(self) -> None:
        sizes = self.cuda_graph_sizes
        if any(size < 1 for size in sizes) or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"cuda_graph_sizes is {sizes}; sizes are at least 1 and ascend, e.g. 1 2 4 8")

    def decode_sizes(self, most_tokens: int) -> tuple[int, ...]:
        """Those that a step of at most so many tokens can need."""
        sizes = self.cuda_graph_sizes or USUAL_SIZES
        return sizes[: bisect_left(sizes, most_tokens) + 1]


class GraphKey(NamedTuple):
    """What is recorded apart.

    whole    one graph; else pieces around attention
    tokens   of a track
    """

    whole: bool
    tokens: int
    tracks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Tokens of a track, ascending, of what is recorded.

    decode, pieces           steps of one track
    cut_decode, cut_pieces   steps of several
    tracks                   so many, where there are several
    row_tokens               most tokens of a row of a whole step: its newest one and drafts
    """

    decode: tuple[int, ...]
    pieces: tuple[int, ...]
    cut_decode: tuple[int, ...] = ()
    cut_pieces: tuple[int, ...] = ()
    tracks: int = 1
    row_tokens: int = 1

    def of(self, *, whole: bool, tracks: int) -> tuple[int, ...]:
        """Those of one kind of step; none where there are other numbers of tracks."""
        if tracks == 1:
            return self.decode if whole else self.pieces
        if tracks != self.tracks:
            return ()
        return self.cut_decode if whole else self.cut_pieces

    def each(self) -> Iterator[GraphKey]:
        """All, pieces first and the largest of each kind first: they are what takes the most memory."""
        for whole in (False, True):
            for tracks in sorted({1, self.tracks}):
                for tokens in reversed(self.of(whole=whole, tracks=tracks)):
                    yield GraphKey(whole, tokens, tracks)

    @property
    def largest_piece(self) -> int:
        """Tokens; 0 without any."""
        return max((*self.pieces, *self.cut_pieces), default=0)


def piece_sizes(most_tokens: int) -> tuple[int, ...]:
    """Powers of two, the last one at most so many tokens."""
    sizes = []
    size = LEAST_PIECE
    while size <= most_tokens:
        sizes.append(size)
        size *= 2
    return tuple(sizes)


def cut_sizes(sizes: Sequence[int], *, least: int, most: int, tracks: int, longest_row: int) -> tuple[int, ...]:
    """Those of `sizes` that a track may be taken to of a step of `least` to `most` tokens that is cut in so many.

    longest_row   tokens of one row, which is not cut
    """
    smallest, largest = -(-least // tracks), min(-(-most // tracks) + longest_row - 1, most)
    return tuple(sizes[bisect_left(sizes, smallest) : bisect_left(sizes, largest) + 1])


def has_prompts(plan: StepPlan) -> bool:
    """Whether some rank may compute prompts in this step."""
    return plan.reason not in WITHOUT_PROMPTS


def taken_to(tokens: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds so many tokens; as many as there are where none does."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else tokens

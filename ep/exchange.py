"""Tokens to their experts and back: `dispatch` and `combine`, exact, in rounds through fixed buffers.

    dispatch   header  tag and counts to every rank; a rank at another place of the program is found here
               rows    one packed row per (token, rank): | slots | weights | x | pad |
    combine    rows    what the combine mode returns

Knows slots and ranks, not experts, layers' weights or why a token goes where. All ranks make the same calls: a rank
without tokens too.

Legend: T tokens here, D model, K top-k, R ranks, N rows received, M (row, slot) pairs received, B bytes of a row.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .combine import COMBINES, Combine, CombineMode, Sent, wide
from .errors import TagMismatch
from .layout import LocalPairs, local_pairs, send_layout
from .posts import odd_one_out
from .terms import Terms
from .transport import Kind, Pending, Tag, Transport

MOST_ROUND_TOKENS = 1 << 20
"""Tokens of one round at most: more than any batch has, and buffers whose bytes can still be counted in 64 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExchangeConfig:
    """How expert ranks are reached."""

    combine: CombineMode = "ranks"
    """What returns: `ranks` one row per token and rank, fewest bytes; `slots` one row per token and slot, so that the
    result does not depend on where experts sit."""

    round_tokens: int = 1024
    """Most tokens a rank sends at once; larger batches go in rounds. Sets the size of the exchange buffers."""

    def __post_init__(self) -> None:
        if self.combine not in COMBINES:
            raise ValueError(f"combine = {self.combine!r}: must be one of {', '.join(COMBINES)}, for example ranks")
        if self.round_tokens < 1:
            raise ValueError(f"round_tokens = {self.round_tokens}: must be at least 1, for example 1024")
        if self.round_tokens > MOST_ROUND_TOKENS:
            raise ValueError(
                f"round_tokens = {reprlib.repr(self.round_tokens)}: must be at most {MOST_ROUND_TOKENS}, "
                "for example 1024"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Arrivals:
    """What this rank computes in one round. x_ND lies in a buffer: it is valid until the track's next dispatch."""

    x_ND: Tensor
    """Rows in source-rank order, in each in the source's token order. Not contiguous: other fields lie between rows."""
    pairs: LocalPairs
    handle: Sent
    """For combine only."""

    @property
    def rows_M(self) -> Tensor:
        """int64: each pair's row in x_ND. Pairs are in (row, top-k) order."""
        return self.pairs.rows_M

    @property
    def slots_M(self) -> Tensor:
        """int64: each pair's slot on this rank, 0 .. L - 1."""
        return self.pairs.slots_M

    @property
    def weights_M(self) -> Tensor:
        """Each pair's weight, in the wide dtype."""
        return self.pairs.weights_M

    @property
    def source_N(self) -> Tensor:
        """int64: the rank that each row came from."""
        splits = torch.tensor(self.handle.recv_splits, device=self.x_ND.device)
        return torch.repeat_interleave(torch.arange(len(splits), device=self.x_ND.device), splits)


@dataclass(frozen=True, slots=True)
class RowFormat:
    """A packed row: K slots (int64), K weights (wide dtype), D of x (run dtype), padding to 8 bytes."""

    hidden: int
    top_k: int
    dtype: torch.dtype

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Bytes of the fields, in order."""
        fields = 8 * self.top_k, wide(self.dtype).itemsize * self.top_k, self.dtype.itemsize * self.hidden
        return *fields, -sum(fields) % 8

    @property
    def num_bytes(self) -> int:
        return sum(self.widths)

    def fields(self, rows_NB: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(slots_NK, weights_NK, x_ND) of packed rows, as views."""
        slots_NB, weights_NB, x_NB, _ = rows_NB.split(self.widths, dim=1)
        return slots_NB.view(torch.int64), weights_NB.view(wide(self.dtype)), x_NB.view(self.dtype)


class _Buffers:
    """One track's fixed memory. Made on the meta device to count it."""

    def __init__(
        self, row: RowFormat, *, round_tokens: int, num_ranks: int, combine: Combine, device: torch.device | str
    ) -> None:
        sent, returned = round_tokens * min(row.top_k, num_ranks), round_tokens * combine.rows_per_token(row.top_k)
        self.packed_TB = torch.zeros(round_tokens, row.num_bytes, dtype=torch.uint8, device=device)
        self.packed_fields = row.fields(self.packed_TB)
        self.send_NB = torch.empty(sent, row.num_bytes, dtype=torch.uint8, device=device)
        self.recv_NB = torch.empty(round_tokens * num_ranks, row.num_bytes, dtype=torch.uint8, device=device)
        self.back_ND = torch.empty(returned, row.hidden, dtype=row.dtype, device=device)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.nbytes for buffer in (self.packed_TB, self.send_NB, self.recv_NB, self.back_ND))


def buffer_bytes(
    *, num_ranks: int, hidden: int, top_k: int, dtype: torch.dtype, config: ExchangeConfig, num_tracks: int = 1
) -> int:
    """Bytes an Exchange allocates when it is built, on one rank. What comes and goes in a round is not in it: sums in
    the wide dtype, a row for each row that arrived and for each token here."""
    row = RowFormat(hidden, top_k, dtype)
    combine = COMBINES[config.combine](num_ranks=num_ranks, slots_per_rank=1)
    buffers = _Buffers(
        row, round_tokens=config.round_tokens, num_ranks=num_ranks, combine=combine, device=torch.device("meta")
    )
    return num_tracks * buffers.num_bytes


class Exchange:
    """dispatch and combine of one group of ranks, for any number of layers; all use the same buffers.

    Slot s of `num_slots` lives on rank s // (num_slots / R). `num_tracks` rounds, of different tag.track, may be in
    flight at the same time. A round is dispatch, wait, combine, wait; the buffers of its track are free again then.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        num_slots: int,
        hidden: int,
        top_k: int,
        dtype: torch.dtype,
        device: torch.device | str,
        config: ExchangeConfig,
        num_tracks: int = 1,
    ) -> None:
        assert num_slots % transport.size == 0, (num_slots, transport.size)
        self.slots_per_rank = num_slots // transport.size
        self.config = config
        self._transport = transport
        self._device = device
        self._row = RowFormat(hidden, top_k, dtype)
        self._combine = COMBINES[config.combine](num_ranks=transport.size, slots_per_rank=self.slots_per_rank)
        self._tracks = [
            _Buffers(
                self._row,
                round_tokens=config.round_tokens,
                num_ranks=transport.size,
                combine=self._combine,
                device=device,
            )
            for _ in range(num_tracks)
        ]

    def num_rounds(self, bucket: int) -> int:
        """Rounds that every rank makes when the rank with the most tokens has `bucket` of them; at least one."""
        return max(1, -(-bucket // self.config.round_tokens))

    def round_slices(self, num_tokens: int, terms: Terms) -> list[slice]:
        """This rank's tokens of each round; empty slices at the end when it has fewer than the bucket."""
        assert num_tokens <= terms.bucket, (num_tokens, terms.bucket)
        size = self.config.round_tokens
        begins = [min(n * size, num_tokens) for n in range(self.num_rounds(terms.bucket))]
        return [slice(begin, min(begin + size, num_tokens)) for begin in begins]

    def dispatch(
        self,
        x_TD: Tensor,
        slots_TK: Tensor,
        weights_TK: Tensor,
        *,
        tag: Tag,
        terms: Terms,  # noqa: ARG002
    ) -> Pending[Arrivals]:
        """Send one round: T <= round_tokens tokens of the run dtype, their slots (int64, -1 none), wide weights.

        Waits for the header, not for the rows. The tag's kind is set here.
        """
        self._check_input(x_TD, slots_TK, weights_TK)
        sent = self._agree(slots_TK, weights_TK, tag)
        buffers = self._tracks[tag.track]
        for field, values in zip(buffers.packed_fields, (slots_TK, weights_TK, x_TD), strict=True):
            field[: x_TD.shape[0]].copy_(values)
        send_NB = buffers.send_NB[: sum(sent.layout.splits)]
        torch.index_select(buffers.packed_TB, 0, sent.layout.tokens_N, out=send_NB)
        rows = self._transport.all_to_all(
            buffers.recv_NB[: sum(sent.recv_splits)],
            send_NB,
            recv_splits=sent.recv_splits,
            send_splits=sent.layout.splits,
            tag=tag._replace(kind=Kind.DISPATCH),
        )
        return rows.then(lambda rows_NB: self._unpack(rows_NB, sent))

    def combine(self, y_MD: Tensor, arrivals: Arrivals, *, tag: Tag) -> Pending[Tensor]:
        """Return the experts' outputs, one for each pair of `arrivals`, unweighted, in the run dtype.

        The value is [T, D] for the tokens that this rank dispatched, in the run dtype, the weighted sum over their
        slots; zeros for a token without any.
        """
        assert y_MD.shape == (arrivals.rows_M.shape[0], self._row.hidden), (y_MD.shape, arrivals.rows_M.shape)
        assert y_MD.dtype is self._row.dtype, (y_MD.dtype, self._row.dtype)
        sent = arrivals.handle
        recv_splits, send_splits = self._combine.splits(sent)
        rows = self._transport.all_to_all(
            self._tracks[tag.track].back_ND[: sum(recv_splits)],
            self._combine.give_back(y_MD, arrivals.pairs, arrivals.x_ND.shape[0]),
            recv_splits=recv_splits,
            send_splits=send_splits,
            tag=tag._replace(kind=Kind.COMBINE),
        )
        return rows.then(lambda rows_ND: self._combine.take_back(rows_ND, sent).to(self._row.dtype))

    def _check_input(self, x_TD: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        num_tokens, row = x_TD.shape[0], self._row
        assert num_tokens <= self.config.round_tokens, (num_tokens, self.config.round_tokens)
        assert x_TD.shape == (num_tokens, row.hidden), (x_TD.shape, row.hidden)
        assert x_TD.dtype is row.dtype, (x_TD.dtype, row.dtype)
        assert slots_TK.shape == weights_TK.shape == (num_tokens, row.top_k), (slots_TK.shape, weights_TK.shape)
        assert slots_TK.dtype is torch.int64, slots_TK.dtype
        assert weights_TK.dtype is wide(row.dtype), (weights_TK.dtype, row.dtype)

    def _agree(self, slots_TK: Tensor, weights_TK: Tensor, tag: Tag) -> Sent:
        """Tell every rank where this one is and how much comes; learn the same of them."""
        size = self._transport.size
        layout = send_layout(slots_TK, slots_per_rank=self.slots_per_rank, num_ranks=size)
        send_pairs = self._combine.count_pairs(slots_TK)
        tag = tag._replace(kind=Kind.HEADER)
        words = [[*tag, *counts] for counts in zip(layout.splits, send_pairs, strict=True)]
        send = torch.tensor(words, dtype=torch.int64, device=self._device)
        ones = (1,) * size
        heard = self._transport.all_to_all(
            torch.empty_like(send), send, recv_splits=ones, send_splits=ones, tag=tag
        ).wait()
        *tags, rows, pairs = zip(*heard.tolist(), strict=True)
        check_tags(list(zip(*tags, strict=True)), rank=self._transport.rank)
        return Sent(layout, slots_TK, weights_TK, rows, send_pairs, pairs)

    def _unpack(self, rows_NB: Tensor, sent: Sent) -> Arrivals:
        slots_NK, weights_NK, x_ND = self._row.fields(rows_NB)
        pairs = local_pairs(slots_NK, weights_NK, rank=self._transport.rank, slots_per_rank=self.slots_per_rank)
        return Arrivals(x_ND, pairs, sent)


def check_tags(words: Sequence[tuple[int, ...]], *, rank: int) -> None:
    """Raise TagMismatch unless all ranks (by rank) said the same tag. All ranks hear the same, so all blame the same:
    the smaller party, the higher rank of two. Holds on transports that do not compare tags themselves."""
    odd = odd_one_out(words, range(len(words)))
    if odd is not None:
        culprit, expected = odd
        raise TagMismatch(culprit, _tag(expected), _tag(words[culprit]), rank=rank, step=words[rank][0])


def _tag(words: tuple[int, ...]) -> Tag:
    """A rank at another place may have sent anything: a kind that is none stays a number."""
    step, layer, track, number, kind = words
    return Tag(step, layer, track, number, Kind(kind) if kind in set(Kind) else kind)  # type: ignore[arg-type]

"""Tracks make the same exchanges in the same order on every rank, however few tokens it has; a rank that does not is
named."""

from __future__ import annotations

import random
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dbo import drive, most_tokens, split
from ep import Exchange, ExchangeConfig, Kind, Pending, Tag, TagMismatch, Terms, ThreadTransport, run_ranks
from ep.wrapping import Wrapping

LIMIT_S = 30.0
HIDDEN, TOP_K, SLOTS_PER_RANK = 2, 2, 2


class Listening(Wrapping):
    """A rank's transport that remembers the tags of its exchanges, in order."""

    def __init__(self, transport: ThreadTransport) -> None:
        super().__init__(transport)
        self.tags: list[Tag] = []

    def all_to_all(self, recv, send, *, recv_splits, send_splits, tag: Tag):
        self.tags.append(tag)
        return self._transport.all_to_all(recv, send, recv_splits=recv_splits, send_splits=send_splits, tag=tag)

    def all_gather(self, row, *, tag: Tag):
        self.tags.append(tag)
        return self._transport.all_gather(row, tag=tag)


def exchange_of(transport: Any, *, num_tracks: int, mode: str = "exact") -> Exchange:
    return Exchange(
        transport,
        num_slots=SLOTS_PER_RANK * transport.size,
        hidden=HIDDEN,
        top_k=TOP_K,
        dtype=torch.float64,
        device="cpu",
        config=ExchangeConfig(exchange=mode, hierarchical="off", round_tokens=3),  # type: ignore[arg-type]
        num_tracks=num_tracks,
    )


def layers(
    exchange: Exchange, num_tokens: int, *, size: int, track: int, bucket: int, halves: bool = False
) -> Generator[Pending[Any] | None, Any, None]:
    """Layers that send every token away and get it back; their last answer is checked."""
    terms = Terms(bucket=bucket)
    x_TD = torch.arange(num_tokens * HIDDEN, dtype=torch.float64).reshape(num_tokens, HIDDEN)
    slots_TK = (torch.arange(num_tokens)[:, None] + torch.tensor([[0, 3]])) % (SLOTS_PER_RANK * size)
    weights_TK = torch.full((num_tokens, TOP_K), 0.5, dtype=torch.float64)
    for layer in range(2):
        if halves:
            yield
        back = []
        for number, part in enumerate(exchange.round_slices(num_tokens, terms)):
            tag = Tag(7, layer, track, number, Kind.DISPATCH)
            arrivals = yield exchange.dispatch(x_TD[part], slots_TK[part], weights_TK[part], tag=tag, terms=terms)
            y_MD = arrivals.x_ND[arrivals.rows_M]
            back.append((yield exchange.combine(y_MD, arrivals, tag=tag._replace(kind=Kind.COMBINE))))
        torch.testing.assert_close(torch.cat(back), x_TD)


def step(transport: Any, rows: Sequence[tuple[int, int]], *, num_tracks: int, bucket: int, longest: int, lead: int):
    """One rank's rows, cut and driven."""
    exchange = exchange_of(transport, num_tracks=num_tracks)
    most = most_tokens(bucket, num_tracks=num_tracks, longest_row=longest)
    parts = [sum(rows[place][0] for place in track) for track in split(rows, num_tracks)]
    drive(
        [
            layers(exchange, tokens, size=transport.size, track=track, bucket=most, halves=lead > 0)
            for track, tokens in enumerate(parts)
        ],
        lead=lead,
    )


@settings(max_examples=12, deadline=None)
@given(
    size=st.sampled_from([1, 2, 3, 5, 8, 17, 64]),
    num_tracks=st.integers(1, 4),
    lead=st.integers(0, 1),
    seed=st.integers(0, 1000),
)
def test_every_rank_makes_the_same_exchanges_in_the_same_order(size: int, num_tracks: int, lead: int, seed: int):
    draw = random.Random(seed)
    most_rows = 3 if size > 16 else 12
    rows_R = [
        [(draw.choice([1, 1, 1, 4]), draw.randrange(1, 99)) for _ in range(draw.choice([0, 0, 1, 2, most_rows]))]
        for _ in range(size)
    ]
    bucket = max(sum(tokens for tokens, _ in rows) for rows in rows_R)
    longest = max([tokens for rows in rows_R for tokens, _ in rows], default=0)

    def on_rank(bare: ThreadTransport) -> list[Tag]:
        transport = Listening(bare)
        step(transport, rows_R[bare.rank], num_tracks=num_tracks, bucket=bucket, longest=longest, lead=lead)
        return transport.tags

    with torch.inference_mode():
        first, *others = run_ranks(size, on_rank, timeout_s=LIMIT_S)
    assert bool(first) == (size > 1)  # a rank alone has nobody to send to
    assert all(tags == first for tags in others)
    assert {tag.track for tag in first} == set(range(num_tracks if size > 1 else 0))


@pytest.mark.parametrize("culprit", [0, 1, 2])
def test_a_rank_that_drives_its_tracks_in_another_order_is_named(culprit: int):
    def on_rank(transport: ThreadTransport) -> None:
        exchange = exchange_of(transport, num_tracks=2)
        order = [1, 0] if transport.rank == culprit else [0, 1]
        drive([layers(exchange, 3, size=3, track=track, bucket=3) for track in order])

    with pytest.raises(TagMismatch, match=f"rank {culprit}") as caught:
        run_ranks(3, on_rank, timeout_s=LIMIT_S)
    assert caught.value.culprit == culprit


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_cuts_a_step_alone_is_named(culprit: int):
    def on_rank(transport: ThreadTransport) -> None:
        exchange = exchange_of(transport, num_tracks=2)
        parts = [1, 2] if transport.rank == culprit else [3]
        drive([layers(exchange, tokens, size=3, track=track, bucket=3) for track, tokens in enumerate(parts)])

    with pytest.raises(TagMismatch) as caught:
        run_ranks(3, on_rank, timeout_s=LIMIT_S)
    assert caught.value.culprit == culprit


def test_with_a_lead_one_track_is_a_stage_ahead_and_no_two_exchanges_are_under_way():
    log: list[str] = []

    def stages(name: str) -> Generator[Pending[Any] | None, Any, None]:
        for layer in range(2):
            log.append(f"{name} projects {layer}")
            yield
            log.append(f"{name} attends {layer}, dispatches")
            yield Pending(lambda: log.append(f"{name}'s rows arrive"))
            log.append(f"{name} computes experts {layer}, combines")
            yield Pending(lambda: log.append(f"{name}'s answers arrive"))

    drive([stages("a"), stages("b")], lead=1)
    assert log[:14] == [
        "a projects 0",
        "a attends 0, dispatches",
        "b projects 0",
        "a's rows arrive",
        "a computes experts 0, combines",
        "b attends 0, dispatches",
        "a's answers arrive",
        "a projects 1",
        "b's rows arrive",
        "b computes experts 0, combines",
        "a attends 1, dispatches",
        "b's answers arrive",
        "b projects 1",
        "a's rows arrive",
    ]


def test_three_tracks_with_a_lead_are_each_a_stage_ahead_of_the_next():
    log: list[str] = []

    def stages(name: str) -> Generator[None, None, str]:
        for stage in range(3):
            log.append(f"{name}{stage}")
            yield
        return name

    assert drive([stages("a"), stages("b"), stages("c")], lead=1) == ["a", "b", "c"]
    assert log == ["a0", "a1", "b0", "a2", "b1", "c0", "b2", "c1", "c2"]


def test_the_room_stays_small_and_no_layer_is_written_twice():
    root = Path(__file__).resolve().parents[2]
    assert sum(len(path.read_text().splitlines()) for path in (root / "dbo").glob("*.py")) < 500
    for name in ("moe/layer.py", "runtime/forward/decoder.py"):
        text = (root / name).read_text()
        assert text.count("def stages(") == 1
        assert "num_tracks" not in text, "a layer does not know how many tracks are driven"

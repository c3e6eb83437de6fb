"""Cut one rank's rows into tracks: whole rows, level in tokens and in attention.

    rows (tokens, context)   (1, 900) (1, 100) (1, 800) (1, 90)       two tracks: rows 0 and 3 | rows 1 and 2

Every rank cuts its own rows; all know how many tokens the fullest track of any rank can have (`most_tokens`), because
the cut promises it. Pure; knows no requests and no ranks. A rank with fewer rows than tracks has empty ones.
"""

from collections.abc import Sequence

Row = tuple[int, int]
"""Tokens that are computed, and how many the last of them attends to."""


def split(rows: Sequence[Row], num_tracks: int) -> list[list[int]]:
    """Places in `rows` of each track, ascending; every row is in one track.

    Heavy rows are placed first, each where the larger of the track's shares of tokens and of attention stays least. No
    track gets more than `most_tokens` of the rows' tokens and the longest row's.
    """
    if num_tracks == 1:
        return [list(range(len(rows)))]
    tokens = [num_tokens for num_tokens, _ in rows]
    work = [num_tokens * context_len for num_tokens, context_len in rows]
    limit = most_tokens(sum(tokens), num_tracks=num_tracks, longest_row=max(tokens, default=0))
    a_token, a_work = 1 / max(sum(tokens), 1), 1 / max(sum(work), 1)
    tracks: list[list[int]] = [[] for _ in range(num_tracks)]
    tokens_of, work_of = [0] * num_tracks, [0] * num_tracks
    for place in sorted(range(len(rows)), key=lambda place: (-work[place], -tokens[place])):
        best, least = -1, (0.0, 0.0)
        for track in range(num_tracks):
            after = tokens_of[track] + tokens[place]
            share, other = after * a_token, (work_of[track] + work[place]) * a_work
            cost = (share, other) if share > other else (other, share)
            if after <= limit and (best < 0 or cost < least):
                best, least = track, cost
        tracks[best].append(place)
        tokens_of[best] += tokens[place]
        work_of[best] += work[place]
    return [sorted(track) for track in tracks]


def most_tokens(num_tokens: int, *, num_tracks: int, longest_row: int) -> int:
    """Tokens that any track of a rank can have, when no rank has more than `num_tokens`, nor a longer row.

    The emptiest track has at most (num_tokens - row) / num_tracks when a row is placed, so that there always is a track
    which stays within ceil(num_tokens / num_tracks) + longest_row - 1. Where all rows are single tokens that is half.
    """
    return min(num_tokens, -(-num_tokens // num_tracks) + max(longest_row, 1) - 1)

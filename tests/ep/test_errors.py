"""The errors say what is wrong in words, and where when it is known."""

from __future__ import annotations

import pytest

from ep import CheckpointError, Kind, PeerFailed, RequestError, SerriedError, Tag, TagMismatch


def test_a_request_error_names_field_value_and_rule():
    error = RequestError("top_p", 1.5, "must be in (0, 1], for example 0.95")
    assert str(error) == "top_p = 1.5: must be in (0, 1], for example 0.95"
    assert (error.field, error.value, error.rank) == ("top_p", 1.5, None)
    assert isinstance(error, ValueError)
    assert isinstance(error, SerriedError)


@pytest.mark.parametrize(
    ("tensor", "file", "message"),
    [
        ("w", "a.safetensors", "w in a.safetensors: expected (2, 3), found (3, 2)"),
        ("w", None, "w: expected (2, 3), found (3, 2)"),
        (None, "a.safetensors", "a.safetensors: expected (2, 3), found (3, 2)"),
    ],
)
def test_a_checkpoint_error_names_what_it_knows(tensor, file, message):
    assert str(CheckpointError(tensor, file, (2, 3), (3, 2))) == message


def test_an_error_says_on_which_rank_and_step_it_was_raised():
    assert str(PeerFailed(3, "raised OSError: disk", rank=1, step=7)) == "rank 1, step 7: rank 3 raised OSError: disk"
    assert str(PeerFailed(3, "ended", rank=0)) == "rank 0: rank 3 ended"


def test_a_tag_mismatch_shows_both_places():
    error = TagMismatch(2, Tag(5, 1, 0, 0, Kind.DISPATCH), Tag(5, 2, 0, 1, Kind.COMBINE))
    assert str(error) == (
        "rank 2 is out of step: expected DISPATCH(step 5, layer 1, track 0, round 0), "
        "found COMBINE(step 5, layer 2, track 0, round 1)"
    )

"""Findings are made of whatever a check does, travel, and are said once where ranks found the same."""

from __future__ import annotations

import pytest

from ep import PeerFailed
from runtime.failure.checkup import Check, Doubt, NotHere, Outcome, Shared, from_word, gather, look, passed, to_word


def check(run, name: str = "wire") -> Check:
    return Check(name=name, run=run, means="it does not work", tries="another one")


def raising(error: Exception):
    def run() -> str:
        raise error

    return run


@pytest.mark.parametrize(
    ("run", "outcome", "words", "means"),
    [
        (lambda: "two", Outcome.OK, "two", ""),
        (raising(NotHere("no GPU")), Outcome.NOT_CHECKED, "no GPU", ""),
        (raising(Doubt("old")), Outcome.DOUBTFUL, "old", "it does not work"),
        (raising(ValueError("wrong\nindeed")), Outcome.FAILED, "wrong", "it does not work"),
        (raising(PeerFailed(1, "is gone")), Outcome.FAILED, "rank 1", "it does not work"),
        (raising(KeyError()), Outcome.FAILED, "KeyError: KeyError()", "it does not work"),
    ],
    ids=["ok", "not here", "doubt", "wrong", "peer", "bare"],
)
def test_whatever_a_check_does_is_a_finding(run, outcome, words, means):
    found = look(check(run))
    assert (found.outcome, found.means) == (outcome, means)
    assert words in found.words
    assert "\n" not in found.words


def test_findings_travel_as_words():
    found = [look(check(lambda: "two")), look(check(raising(Doubt("old"))))]
    assert from_word(to_word(found)) == found


def test_what_ranks_found_alike_is_said_once():
    ok, bad = look(check(lambda: "fine")), look(check(raising(ValueError("bent"))))
    only = look(check(lambda: "here", "extra"))
    together = gather([[ok], [bad], [ok, only]])
    assert [(each.finding.name, each.finding.words, each.ranks) for each in together] == [
        ("wire", "fine", (0, 2)),
        ("wire", "bent", (1,)),
        ("extra", "here", (2,)),
    ]
    assert not passed(together)
    assert passed([Shared(finding=ok, ranks=(0,)), Shared(finding=look(check(raising(Doubt("old")))), ranks=(1,))])

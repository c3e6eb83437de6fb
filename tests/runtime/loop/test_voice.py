"""Who says what when a rank is found slow: rank 0 the finding, the slow rank what its device says of it."""

from __future__ import annotations

import pytest

from ep import PeerFailed
from runtime.failure.straggler import Finding
from runtime.loop.voice import Straggling, Voice
from runtime.requests.outputs import Note

HOT = "it is hot (slowed down by the driver)"


def heard(rank: int, finding: Finding) -> list[str]:
    said: list[Note] = []
    asked: list[int] = []

    def excuses() -> tuple[str, ...]:
        asked.append(rank)
        return (HOT, "it reported Xid 79")

    voice = Voice(rank, emit=lambda _: None, notify=said.append, excuses=excuses)
    try:
        voice.heed(finding, step=7, degraded=())
    finally:
        assert asked == ([rank] if finding.slow and rank == finding.rank else [])
    return [note.text for note in said]


def finding(*, slow: bool = True, action: str = "warn") -> Finding:
    return Finding(rank=2, slow=slow, action=action, slowness=3.0, window=32)  # type: ignore[arg-type]


def test_rank_0_says_the_finding_and_the_slow_rank_why():
    assert heard(0, finding()) == [f"{finding()} [step 7]"]
    assert heard(1, finding()) == []
    assert heard(2, finding()) == [f"rank 2, of its device: {HOT}; it reported Xid 79 [step 7]"]


def test_a_rank_that_is_fast_again_owes_no_excuse():
    assert heard(2, finding(slow=False)) == []
    assert heard(0, finding(slow=False)) == [f"{finding(slow=False)} [step 7]"]


def test_the_group_ends_with_the_slow_ranks_excuse_and_its_name_on_the_others():
    with pytest.raises(Straggling, match="Xid 79"):
        heard(2, finding(action="abort"))
    with pytest.raises(PeerFailed, match="is given up") as failure:
        heard(1, finding(action="abort"))
    assert failure.value.culprit == 2

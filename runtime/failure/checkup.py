"""Findings of a first look at a machine: what was looked at, how it went, what a failure means and what to try.

    ok            it is as it should be
    doubtful      it may work, and the words say why it may not
    failed        it will not work
    not checked   it is not here to be looked at

Knows how findings are made and gathered; what is looked at is `group_checks`' and the command's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from ep import SerriedError


class Outcome(StrEnum):
    """How a check went."""

    OK = "ok"
    DOUBTFUL = "doubtful"
    FAILED = "failed"
    NOT_CHECKED = "not checked"


class NotHere(Exception):
    """What was to be looked at is not on this machine."""


class Doubt(Exception):
    """It works, but."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One check's outcome. `words` say what was found; `means` and `tries` are empty where all is well."""

    name: str
    outcome: Outcome
    words: str
    means: str = ""
    tries: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """`run` says in words what it found, and raises what is wrong; `means` and `tries` are said of that."""

    name: str
    run: Callable[[], str]
    means: str
    tries: str


def look(check: Check) -> Finding:
    """Run one check. Whatever it raises is a finding, for the next one may still be worth a look."""
    begin = time.monotonic()
    outcome, means, tries = Outcome.OK, "", ""
    try:
        words = check.run()
    except NotHere as error:
        outcome, words = Outcome.NOT_CHECKED, str(error)
    except Doubt as error:
        outcome, words, means, tries = Outcome.DOUBTFUL, str(error), check.means, check.tries
    except Exception as error:
        first_line = (str(error).strip() or repr(error)).splitlines()[0]
        kind = "" if isinstance(error, ValueError | AssertionError | SerriedError) else f"{type(error).__name__}: "
        outcome, words = Outcome.FAILED, kind + first_line
        means, tries = check.means, check.tries
    seconds = time.monotonic() - begin
    return Finding(name=check.name, outcome=outcome, words=words, means=means, tries=tries, seconds=seconds)


def look_at_all(checks: Iterable[Check], *, before: Callable[[Check], None]) -> Iterator[Finding]:
    """One after the other; `before` is told of each as it begins."""
    for check in checks:
        before(check)
        yield look(check)


def to_word(findings: Sequence[Finding]) -> str:
    """One rank's findings as it sends them to rank 0."""
    return json.dumps([asdict(finding) for finding in findings])


def from_word(word: str) -> list[Finding]:
    """The inverse of `to_word`."""
    return [Finding(**(row | {"outcome": Outcome(row["outcome"])})) for row in json.loads(word)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """A finding and the ranks that made it."""

    finding: Finding
    ranks: tuple[int, ...]


def gather(by_rank: Sequence[Sequence[Finding]]) -> list[Shared]:
    """What ranks found alike is said once; in the order of the checks, the ranks that differ one after the other."""
    names = list(dict.fromkeys(finding.name for findings in by_rank for finding in findings))
    together: list[Shared] = []
    for name in names:
        alike: dict[tuple[str, ...], list[int]] = {}
        firsts: dict[tuple[str, ...], Finding] = {}
        for rank, findings in enumerate(by_rank):
            for finding in findings:
                if finding.name == name:
                    key = (finding.outcome, finding.words)
                    firsts.setdefault(key, finding)
                    alike.setdefault(key, []).append(rank)
        together += [Shared(finding=firsts[key], ranks=tuple(ranks)) for key, ranks in alike.items()]
    return together


def passed(together: Sequence[Shared]) -> bool:
    """Whether nothing has failed."""
    return all(shared.finding.outcome is not Outcome.FAILED for shared in together)

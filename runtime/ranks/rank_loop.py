"""What a rank does from ready to end: wait for the front's letters, run a wave when it says so, report.

The same loop in rank 0's process, where it has a thread of its own, and in every other rank's. Knows a worker and a
mailbox; does not know where the front is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..failure.recorder import Recorder
from ..failure.verdict import Phase
from ..loop.ranks import Item, Tray
from ..loop.worker import Worker
from ..requests.outputs import News, Note
from .letters import EndLetter, NewsLetter, NoteLetter, ReadyLetter, WaveEndLetter, WaveLetter, item_of
from .mailbox import Mailbox


class RankInbox:
    """What came between waves, then what comes while one runs."""

    def __init__(self, mailbox: Mailbox) -> None:
        self._mailbox = mailbox
        self._kept = Tray()

    def keep(self, item: Item) -> None:
        """For the next wave."""
        self._kept.put(item)

    def take(self) -> list[Item]:
        """For the protocol see `ranks.Inbox`."""
        return [*self._kept.take(), *self._mailbox.take()]


def speaker(mailbox: Mailbox) -> Callable[[Sequence[News]], None]:
    """What a worker's `emit` is to be."""
    return lambda items: mailbox.say(NewsLetter(tuple(items)))


def notifier(mailbox: Mailbox) -> Callable[[Note], None]:
    """What a worker's `notify` is to be."""
    return lambda note: mailbox.say(NoteLetter(note))


def run_rank(worker: Worker, mailbox: Mailbox, inbox: RankInbox, recorder: Recorder) -> None:
    """Serve the front until it says that this is the end. What the worker raises comes out."""
    capacity = worker.scheduler.capacity
    mailbox.say(
        ReadyLetter(
            num_pages=capacity.num_pages,
            page_size=capacity.page_size,
            max_model_len=capacity.max_model_len,
        )
    )
    while True:
        recorder.stamp(Phase.IDLE, worker.sequence)
        letter = mailbox.receive()
        if isinstance(letter, EndLetter):
            worker.close()
            return
        if isinstance(letter, WaveLetter):
            worker.run_wave()
            mailbox.say(WaveEndLetter(worker.stats()))
        else:
            inbox.keep(item_of(letter))

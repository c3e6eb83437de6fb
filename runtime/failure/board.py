"""One page of memory that a rank and its pulse share: where the rank stands now and stood before, and who failed.

The rank writes a stamp for every phase it enters, in the same thread always; the pulse reads them without asking, so
that a rank that cannot speak can still be read. The page has no name in any file system: it lives as long as one of
the two holds it. Knows memory and numbers; decides nothing.

    words       state, predicted step, number of stamps ...          64-bit integers, one writer each
    verdict     who failed; written by the pulse, once
    error       what this rank raised; written by the rank, once
    trace       its traceback
    ring        the last RECORDS stamps, | number | ns | step | exchanges, layer, waits, phase |

A stamp's number is stored last, after its record: a reader that finds the number finds the record. A reader that is
overtaken by the writer (RECORDS stamps during one read) sees it by the record's own number.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from .verdict import VERDICT_BYTES, Phase, Verdict, pack_verdict, unpack_verdict

RECORDS = 1 << 15
"""64 steps of 58 MoE layers with two exchanges each, in two tracks, with their waits."""

TRACE_BYTES = 1 << 13

_MAGIC = 0x5352_4244_0001
_RECORD = struct.Struct("<qqqq")
_VERDICT_AT = 1 << 9
_ERROR_AT = _VERDICT_AT + VERDICT_BYTES
_TRACE_AT = 1 << 11
_RING_AT = _TRACE_AT + TRACE_BYTES
BOARD_BYTES = _RING_AT + RECORDS * _RECORD.size

# Which 64-bit word holds what.
_W_MAGIC, _W_RANK, _W_SIZE, _W_PID, _W_STATE, _W_PREDICTED, _W_STAMPS = range(7)
_W_VERDICT, _W_ERROR, _W_SECOND_HAND, _W_TRACE, _W_SPOKEN, _W_FLIGHT = range(8, 14)

_DISPATCH, _COMBINE = int(Phase.DISPATCH), int(Phase.COMBINE)


class State(IntEnum):
    """What a rank is about. The numbers are stored: add, never renumber.

    STARTING: builds itself, loads. WARM: warms up. Both may take long. READY: steps. DRAINING: takes no new requests.
    ENDED: has ended in order, or will at once.
    """

    STARTING = 0
    WARM = 1
    READY = 2
    DRAINING = 3
    ENDED = 4


class Stamp(NamedTuple):
    """A rank entered a phase. `ns`: time.monotonic_ns() of its machine.

    exchanges: DISPATCH and COMBINE stamps of this step so far. waits: it has done its own part of the phase and waits
    for others.
    """

    number: int
    ns: int
    step: int
    phase: Phase
    layer: int
    exchanges: int
    waits: bool

    @property
    def place(self) -> tuple[int, int, int, bool]:
        """Grows in the order of the program, which is the same on all ranks: who has the smaller place is behind."""
        stage = Phase.DISPATCH if self.phase is Phase.COMBINE else self.phase
        return self.step, stage, self.exchanges if stage is Phase.DISPATCH else 0, self.waits


class Board:
    """See the module. `create` makes one in the rank, `attach` opens the same one by its descriptor in the pulse."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map = mmap.mmap(descriptor, BOARD_BYTES)
        self._words = memoryview(self._map)[:_VERDICT_AT].cast("q")
        self._number = 0
        self._step = -1
        self._exchanges = 0
        self._last = (0, 0)  # step and packed place of the last stamp

    @classmethod
    def create(cls, *, rank: int, size: int) -> Board:
        """A new page for this process."""
        descriptor = os.memfd_create("serried-board", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, BOARD_BYTES)
        board = cls(descriptor)
        words = board._words
        words[_W_RANK], words[_W_SIZE], words[_W_PID], words[_W_MAGIC] = rank, size, os.getpid(), _MAGIC
        return board

    @classmethod
    def attach(cls, descriptor: int) -> Board:
        """The page behind a descriptor that another process made with `create`."""
        board = cls(descriptor)
        assert board._words[_W_MAGIC] == _MAGIC, hex(board._words[_W_MAGIC])
        return board

    def stamp(self, phase: int, step: int, layer: int = 0) -> None:
        """This rank enters `phase` of `step`: the step it is running, also while it reads an older one's tokens."""
        if step != self._step:
            self._step = step
            self._exchanges = 0
        if _DISPATCH <= phase <= _COMBINE:
            self._exchanges += 1
        self._write(step, self._exchanges << 32 | layer << 16 | phase)

    def wait(self) -> None:
        """This rank has done its part of the phase that it stamped last, and now waits for the others."""
        step, place = self._last
        self._write(step, place | 1 << 8)

    def _write(self, step: int, place: int) -> None:
        number = self._number
        at = _RING_AT + number % RECORDS * 32
        _RECORD.pack_into(self._map, at, number, time.monotonic_ns(), step, place)
        self._last = (step, place)
        self._number = self._words[_W_STAMPS] = number + 1

    @property
    def rank(self) -> int:
        return self._words[_W_RANK]

    @property
    def size(self) -> int:
        return self._words[_W_SIZE]

    @property
    def pid(self) -> int:
        return self._words[_W_PID]

    @property
    def state(self) -> State:
        return State(self._words[_W_STATE])

    @state.setter
    def state(self, state: State) -> None:
        self._words[_W_STATE] = state

    @property
    def predicted_s(self) -> float:
        """How long a step should take; 0 when nobody has said."""
        return self._words[_W_PREDICTED] / 1e9

    @predicted_s.setter
    def predicted_s(self, seconds: float) -> None:
        self._words[_W_PREDICTED] = int(seconds * 1e9)

    @property
    def num_stamps(self) -> int:
        return self._words[_W_STAMPS]

    def last_stamp(self) -> Stamp | None:
        """Where the rank stands; None before its first stamp."""
        while number := self.num_stamps:
            stamp = self._read(number - 1)
            if stamp is not None:
                return stamp
        return None

    def stamps(self) -> list[Stamp]:
        """All that the ring still holds, oldest first."""
        end = self.num_stamps
        found = [self._read(number) for number in range(max(0, end - RECORDS), end)]
        return [stamp for stamp in found if stamp is not None]

    def _read(self, number: int) -> Stamp | None:
        """One record; None when the writer has come round to it meanwhile."""
        found, ns, step, place = _RECORD.unpack_from(self._map, _RING_AT + number % RECORDS * 32)
        if found != number:
            return None
        return Stamp(
            number=number,
            ns=ns,
            step=step,
            phase=Phase(place & 0xFF),
            layer=place >> 16 & 0xFFFF,
            exchanges=place >> 32,
            waits=bool(place >> 8 & 1),
        )

    @property
    def verdict(self) -> Verdict | None:
        """Who failed, once it is known."""
        return self._get(_W_VERDICT, _VERDICT_AT)

    @verdict.setter
    def verdict(self, verdict: Verdict) -> None:
        self._set(_W_VERDICT, _VERDICT_AT, verdict)

    @property
    def error(self) -> Verdict | None:
        """What this rank raised."""
        return self._get(_W_ERROR, _ERROR_AT)

    @property
    def error_is_second_hand(self) -> bool:
        """What was raised is a consequence of another rank's failure, so that one's own word goes first."""
        return bool(self._words[_W_SECOND_HAND])

    def raise_error(self, verdict: Verdict, *, second_hand: bool, trace: str) -> None:
        """Say that this rank has raised; only the first word counts. `trace`: its end is kept."""
        if self._words[_W_ERROR]:
            return
        encoded = trace.encode(errors="replace")[-TRACE_BYTES:]
        self._map[_TRACE_AT : _TRACE_AT + len(encoded)] = encoded
        self._words[_W_TRACE] = len(encoded)
        self._words[_W_SECOND_HAND] = second_hand
        self._set(_W_ERROR, _ERROR_AT, verdict)

    @property
    def trace(self) -> str:
        """The end of the traceback of what this rank raised."""
        return self._map[_TRACE_AT : _TRACE_AT + self._words[_W_TRACE]].decode(errors="replace")

    @property
    def has_spoken(self) -> bool:
        """The rank has told the user itself how it ends."""
        return bool(self._words[_W_SPOKEN])

    @has_spoken.setter
    def has_spoken(self, spoken: bool) -> None:
        self._words[_W_SPOKEN] = spoken

    @property
    def flight_is_written(self) -> bool:
        """The rank has written its flight record itself."""
        return bool(self._words[_W_FLIGHT])

    @flight_is_written.setter
    def flight_is_written(self, written: bool) -> None:
        self._words[_W_FLIGHT] = written

    def _get(self, word: int, at: int) -> Verdict | None:
        return unpack_verdict(self._map[at : at + VERDICT_BYTES]) if self._words[word] else None

    def _set(self, word: int, at: int, verdict: Verdict) -> None:
        self._map[at : at + VERDICT_BYTES] = pack_verdict(verdict)
        self._words[word] = 1

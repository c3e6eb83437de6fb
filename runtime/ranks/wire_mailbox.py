"""A rank's end of the wire to the front door: a mailbox that never waits while a wave runs.

When the front door is gone, what this rank still holds is aborted, so that the wave comes to its end, and then it is
told that this is the end: a rank outlives nobody. Knows sockets and letters; does not know what a rank does with them.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

from ..loop.ranks import Abort, Item
from .letters import EndLetter, ToFront, ToRank
from .mailbox import step_item
from .wire import Command, FlushLetter, ProfileLetter, StopProfileLetter, WireToFront, pack, unpack_at_rank
from .wire_sockets import has_message

_COMMANDS = (FlushLetter, ProfileLetter, StopProfileLetter)


class Servant(Protocol):
    """What a rank does besides steps; see `service.Service`."""

    def turn(self) -> None: ...

    def tell_cache(self) -> None: ...

    def idle_ms(self) -> int | None: ...

    def obey(self, command: Command, /) -> None: ...

    def unfinished_ids(self) -> tuple[str, ...]: ...


class WireMailbox:
    """See `mailbox.Mailbox`. `socket` is a rank's (see `wire_sockets`), and is used in the rank's thread only."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._events = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._found: deque[ToRank] = deque()
        self._servant: Servant | None = None
        self._front_is_gone = False
        self._was_ended = False

    @property
    def is_orphaned(self) -> bool:
        """Whether the front door went without a word of the end."""
        return self._front_is_gone and not self._was_ended

    def attach(self, servant: Servant) -> None:
        """Who does what is asked besides requests, before the first letter is taken."""
        self._servant = servant

    def receive(self) -> ToRank:
        """For the protocol see `mailbox.Mailbox`. The end, once the front door is gone."""
        if self._servant is not None:
            self._servant.tell_cache()
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        while True:
            self._look_for_front()
            self._read()  # after that look: what was said before it went is here by then
            if self._found:
                letter = self._found.popleft()
                self._was_ended = isinstance(letter, EndLetter)
                return letter
            if self._front_is_gone:
                return EndLetter()
            poller.poll(self._servant.idle_ms() if self._servant is not None else None)

    def take(self) -> list[Item]:
        """For the protocol see `mailbox.Mailbox`; called once a step, and so is the servant."""
        self._read()
        items = [step_item(self._found.popleft()) for _ in range(len(self._found))]
        assert self._servant is not None, "a wave runs without a servant"
        self._servant.turn()
        self._look_for_front()
        if self._front_is_gone:
            items += [Abort(request_id=request_id) for request_id in self._servant.unfinished_ids()]
        return items

    def say(self, letter: ToFront | WireToFront) -> None:
        """For the protocol see `mailbox.Mailbox`. Never waits; what is said to a front door that is gone is lost."""
        try:
            self._socket.send(pack(letter), zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._front_is_gone = True

    def close(self, *, linger_s: float = 2.0) -> None:
        """Leave; what is said already may take so long to be on its way."""
        self._socket.disable_monitor()
        self._events.close(0)
        self._socket.close(0 if self._front_is_gone else int(1000 * linger_s))

    def _look_for_front(self) -> None:
        if has_message(self._events):
            recv_monitor_message(self._events, zmq.NOBLOCK)
            self._front_is_gone = True

    def _read(self) -> None:
        while has_message(self._socket):
            letter = unpack_at_rank(self._socket.recv(zmq.NOBLOCK))
            if isinstance(letter, _COMMANDS):
                assert self._servant is not None, "a command before the rank is ready"
                self._servant.obey(letter)
            else:
                self._found.append(letter)

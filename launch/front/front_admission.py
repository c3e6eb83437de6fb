"""Whether one more request is let in: by prompt tokens that wait, by pages that may be asked for, by number.

Refused early, with a reason and a guess of when to come again, rather than late. A house that is empty takes whatever
can run at all. Knows sums; does not know which rank has what (see `runtime.ranks.placing`).
"""

from __future__ import annotations

from collections.abc import Callable

from runtime.ranks.placing import FrontDesk

from .front_client import Refused
from .front_config import FrontConfig

LEAST_RETRY_S, MOST_RETRY_S = 0.1, 30.0
WINDOW_S = 2.0
"""Over which it is counted how fast the queue moves."""


class Rate:
    """Units a second, over the last window or two."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = clock()
        self._count = 0
        self._last = 0.0

    def add(self, units: int) -> None:
        """So many more just now."""
        self._turn()
        self._count += units

    @property
    def per_s(self) -> float:
        """0 where nothing has happened lately."""
        self._turn()
        passed = self._clock() - self._began
        return max(self._last, self._count / passed if passed > WINDOW_S / 4 else 0.0)

    def _turn(self) -> None:
        passed = self._clock() - self._began
        if passed >= WINDOW_S:
            self._last = self._count / passed if passed < 2 * WINDOW_S else 0.0
            self._began, self._count = self._clock(), 0


class Gate:
    """The front door's. `desk` knows what is in the house."""

    def __init__(self, config: FrontConfig, desk: FrontDesk, *, clock: Callable[[], float]) -> None:
        self._config = config
        self._desk = desk
        self._computed = Rate(clock)
        self._ended = Rate(clock)

    def moved(self, *, tokens: int, pages: int) -> None:
        """So many prompt tokens wait no more, so many pages were given back."""
        self._computed.add(tokens)
        self._ended.add(pages)

    def check(self, *, tokens: int, pages: int, requests: int, num_open: int) -> None:
        """Raise Refused unless `requests` more fit, of so many prompt tokens and pages in sum, beside `num_open`."""
        if not num_open:
            return
        config = self._config
        if num_open + requests > config.max_open_requests:
            raise self._refused(
                "queue_requests", f"{num_open} requests are open, and at most {config.max_open_requests} may be", 1.0
            )
        queued = sum(self._desk.queued_tokens)
        if queued + tokens > config.max_queued_tokens:
            words = f"{queued} prompt tokens wait, and {tokens} more would exceed {config.max_queued_tokens}"
            raise self._refused(
                "queue_tokens", words, _time(queued + tokens - config.max_queued_tokens, self._computed)
            )
        used, allowed = sum(self._desk.used_pages), int(config.max_cache_demand * sum(self._desk.num_pages))
        if used + pages > allowed:
            words = f"requests may ask for {used} pages of the cache, and {pages} more would exceed {allowed}"
            raise self._refused("queue_pages", words, _time(used + pages - allowed, self._ended))

    def _refused(self, reason: str, words: str, retry_after_s: float) -> Refused:
        return Refused(reason, words, retry_after_s=min(max(retry_after_s, LEAST_RETRY_S), MOST_RETRY_S))


def _time(units: int, rate: Rate) -> float:
    """Seconds until so many are done; one, where nothing tells."""
    return units / rate.per_s if rate.per_s else 1.0

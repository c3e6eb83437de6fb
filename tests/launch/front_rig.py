"""A front door's group of ranks without sockets: the ranks are threads of this process, letters go through the codec.

`ThreadLink` is a real engine's ranks behind `front_link.RankLink`; `ScriptedLink` says what a test tells it to say.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.front.front_group import FrontGroup
from launch.front.front_house import GroupSettings
from launch.front.front_link import Hear
from runtime.ranks.letters import EndLetter, NewsLetter, NoteLetter, ReadyLetter, WaveEndLetter, WaveLetter, item_of
from runtime.ranks.wire import FactsLetter, FailedLetter, WireToFront, pack, unpack_at_front, unpack_at_rank
from runtime.requests.outputs import News
from runtime.thread_ranks import ThreadRanks
from tests.runtime.mixes import SMALL_V3, Settings, engine_config


def facts(**changed: Any) -> FactsLetter:
    """Those of the small random model."""
    known = {
        "model_path": "m", "model_type": "deepseek_v3", "vocab_size": 160, "eos_token_ids": (1,), "bos_token_id": 0,
        "model_dtype": "float64", "kv_cache_dtype": "float64", "max_num_seqs": 4, "config_hash": "0", "startup_s": {},
        "notes": (), "version": "0", "commit": "0",
    }  # fmt: skip
    return FactsLetter(**(known | changed))


def small_model(folder: Path) -> Path:
    (folder / "config.json").write_text(json.dumps(SMALL_V3))
    return folder


class ThreadLink:
    """Real ranks on small random weights. `fail_at`: so many words of the ranks are heard, then rank 1 is said to have
    failed, and nothing more comes."""

    def __init__(self, model: Path, settings: Settings, *, fail_at: int | None = None) -> None:
        self.ranks = ThreadRanks(engine_config(model, settings), drafter=None, on_plan=None, on_progress=None)
        self._fail_at = fail_at
        self._heard = 0
        self._waves = 0
        self._thread: threading.Thread | None = None

    def start(self, hear: Hear, lose: Callable[[str], None]) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._tell(0, facts())
        for rank, capacity in enumerate(self.ranks.facts.capacities):
            self._tell(rank, ReadyLetter(capacity.num_pages, capacity.page_size, capacity.max_model_len))

    def send(self, rank: int, letter: Any) -> None:
        letter = unpack_at_rank(bytes(pack(letter)))
        if isinstance(letter, WaveLetter):
            self._waves += 1
            if self._waves % len(self.ranks.workers) == 0:
                if self._thread is not None:
                    self._thread.join()
                self._thread = threading.Thread(target=self._wave)
                self._thread.start()
        elif not isinstance(letter, EndLetter):
            self.ranks.send(rank, item_of(letter))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()
        self.ranks.close(RuntimeError("the test is over"))

    def _wave(self) -> None:
        for rank, news in self.ranks.wave():
            self._tell(rank, NewsLetter((news,)) if isinstance(news, News) else NoteLetter(news))
        for stats in self.ranks.stats():
            self._tell(stats.rank, WaveEndLetter(stats))

    def _tell(self, rank: int, letter: WireToFront) -> None:
        self._heard += 1
        if self._fail_at is not None and self._heard > self._fail_at:
            letter = FailedLetter(1, "planted")
        self._loop.call_soon_threadsafe(self._hear, rank, unpack_at_front(bytes(pack(letter))))


class ScriptedLink:
    """Ranks that say nothing by themselves; `sent` is what they were told."""

    def __init__(self, size: int = 2, *, pages: int = 16, page_size: int = 4, max_model_len: int = 64) -> None:
        self.size = size
        self.sent: list[tuple[int, Any]] = []
        self.closed = False
        self._ready = ReadyLetter(pages, page_size, max_model_len)

    def start(self, hear: Hear, lose: Callable[[str], None]) -> None:
        self.hear, self.lose = hear, lose

    def send(self, rank: int, letter: Any) -> None:
        self.sent.append((rank, unpack_at_rank(bytes(pack(letter)))))

    def close(self) -> None:
        self.closed = True

    def be_ready(self) -> None:
        self.hear(0, facts())
        for rank in range(self.size):
            self.hear(rank, self._ready)

    def said(self, kind: type) -> list[Any]:
        """Letters of a kind, in order, with their rank."""
        return [(rank, letter) for rank, letter in self.sent if type(letter) is kind]

    def news(self, key: str, *tokens: int, end: str | None = None, rank: int = 0, **more: Any) -> None:
        known = {"logprobs": None, "num_cached": 0, "num_preemptions": 0} | more
        news = News(key, tokens, known["logprobs"], end, known["num_cached"], known["num_preemptions"])
        self.hear(rank, unpack_at_front(bytes(pack(NewsLetter((news,))))))


def group_on(link: Any, *, size: int = 2, **settings: Any) -> FrontGroup:
    return FrontGroup(link, GroupSettings(size=size, served_model_name="small", **settings))

"""Pages by NIXL: the fetcher reads them where they lie in the lender's memory, over UCX, into its own cache.

Each side has an agent, to which the memory of its whole cache is known. A manifest says where the lender's is; which
of its pages are read is the fetcher's to say, page by page and layer by layer, and only what was lent is asked for.

NIXL: https://github.com/ai-dynamo/nixl. The package is `nixl` (pip install serried[nixl]).
"""

from __future__ import annotations

import asyncio
import importlib
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from .connector import KvLoadError
from .kv_frames import Frames
from .kv_letters import Manifest
from .kv_pages import PageBytes

POLL_S = 0.0005


class Place(msgspec.Struct, frozen=True):
    """Where a lender's pages are: page p of layer l lies at begin + l * layer_step + p * page_step."""

    agent: bytes
    begin: int
    layer_step: int
    page_step: int
    device: int
    memory: str


_decoder = msgspec.msgpack.Decoder(Place)


class NixlMover:
    """See `kv_fetch.Mover`. Raises ValueError where there is no NIXL."""

    def __init__(self, cache: PageBytes) -> None:
        self._cache = cache
        self._agent = _agent()
        on_gpu = cache.device.type == "cuda"
        self._memory, self._device = ("VRAM", cache.device.index or 0) if on_gpu else ("DRAM", 0)
        begin, size = cache.region
        self._region = self._agent.register_memory([(begin, size, self._device, "")], self._memory)
        steps = cache.steps
        place = Place(self._agent.get_agent_metadata(), begin, steps[0], steps[1], self._device, self._memory)
        self.place = msgspec.msgpack.encode(place)
        self._agents: dict[bytes, str] = {}

    async def pull(self, frames: Frames, manifest: Manifest, *, skip: int, pages: Sequence[int]) -> None:  # noqa: ARG002
        """For the protocol see `kv_fetch.Mover`."""
        try:
            place = _decoder.decode(manifest.place)
        except msgspec.DecodeError as error:
            raise KvLoadError(f"the engine there does not say where its pages are: {error}") from error
        cache, size = self._cache, self._cache.layer_bytes
        layers = range(cache.num_layers)
        theirs = [
            (place.begin + layer * place.layer_step + page * place.page_step, size, place.device)
            for layer in layers
            for page in manifest.pages[skip:]
        ]
        mine = [(cache.address(layer, page), size, self._device) for layer in layers for page in pages]
        try:
            await self._read(place, theirs, mine)
        except _nixl_errors() as error:
            raise KvLoadError(f"NIXL: {error or type(error).__name__}") from error

    def tick(self) -> None:
        """For the protocol see `kv_fetch.Mover`: NIXL's own thread for that would keep a core busy for ever."""
        self._agent.get_new_notifs()

    async def _read(self, place: Place, theirs: list[tuple[int, int, int]], mine: list[tuple[int, int, int]]) -> None:
        agent = self._agent
        name = self._agents.get(place.agent)
        if name is None:
            name = self._agents[place.agent] = agent.add_remote_agent(place.agent)
        handle = agent.initialize_xfer(
            "READ", agent.get_xfer_descs(mine, self._memory), agent.get_xfer_descs(theirs, place.memory), name
        )
        try:
            state = agent.transfer(handle)
            while state == "PROC":
                await asyncio.sleep(POLL_S)
                state = agent.check_xfer_state(handle)
            if state != "DONE":
                raise KvLoadError(f"NIXL: the read ended as {state}")
        except asyncio.CancelledError:
            await self._let_it_end(handle)
            raise
        finally:
            agent.release_xfer_handle(handle)

    async def _let_it_end(self, handle: Any) -> None:
        """Nothing is to be written to pages that are given back, however long that takes."""
        while self._agent.check_xfer_state(handle) == "PROC":
            await asyncio.sleep(POLL_S)

    def close(self) -> None:
        """Let go of the memory, and of the agents of others."""
        for name in self._agents.values():
            try:
                self._agent.remove_remote_agent(name)
            except _nixl_errors():
                continue  # it is gone with its engine
        self._agents.clear()
        self._agent.deregister_memory(self._region)


def _agent() -> Any:
    try:
        api = importlib.import_module("nixl._api")
    except ImportError as error:
        raise ValueError(
            f"kv_connector nixl needs the package nixl ({error}): pip install 'serried[nixl]', or choose tcp"
        ) from error
    return api.nixl_agent(
        f"serried-{secrets.token_hex(8)}", api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
    )


def _nixl_errors() -> tuple[type[Exception], ...]:
    bindings = importlib.import_module("nixl._bindings")  # the package is here, else there were no agent
    found = [value for name, value in vars(bindings).items() if name.startswith("nixl") and name.endswith("Error")]
    return (RuntimeError, *found)

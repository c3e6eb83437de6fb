"""Connectors by name, in the order in which they are asked. A missing package, folder or port is a clear error here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from attention_mla import LatentCache

from ..kv.connector import Connector
from ..kv.hand_over import HandOver
from ..kv.kv_fetch import Mover
from ..kv.kv_file import FileConnector
from ..kv.kv_host import HostConnector
from ..kv.kv_nixl import NixlMover
from ..kv.kv_pages import Kind, PageBytes, model_digest
from ..kv.kv_peer import PeerConnector, PeerTerms
from ..kv.kv_tcp import TcpMover
from ..requests.kv_config import KvConfig
from ..requests.pages import PagePool
from ..requests.prefix import PrefixCache
from .settling import Settled

MOVERS: dict[str, Callable[[PageBytes], Mover]] = {"nixl": NixlMover, "tcp": TcpMover}


def build_hand_over(
    settled: Settled, cache: LatentCache, pool: PagePool, prefix: PrefixCache, *, rank: int
) -> HandOver:
    """How one rank's latents come from elsewhere and go there; without connectors nothing does."""
    kv = settled.config.kv
    if not kv.names:
        return HandOver(pool, prefix)
    pages = PageBytes(cache)
    hand_over = HandOver(
        pool,
        prefix,
        connectors=build_connectors(kv, pages, model=_model_digest(settled), rank=rank),
        cache=pages,
        timeout_s=kv.kv_load_timeout_s,
        recompute=kv.kv_load_failure_policy == "recompute",
    )
    prefix.save = hand_over.save if kv.stores else None
    return hand_over


def _model_digest(settled: Settled) -> str:
    """Of the model and of all that makes its latents what they are."""
    config = settled.config
    seed = config.seed if config.load_format == "dummy" else None
    run = (settled.dtype, settled.keep_fp8, config.load_format, seed)
    return model_digest(replace(settled.model, warnings=()), Path(config.model), run=run)


def build_connectors(config: KvConfig, cache: PageBytes, *, model: str, rank: int) -> tuple[Connector, ...]:
    """One rank's. `model` is what pages of other models must not be taken for (see `kv_pages.model_digest`).

    Raises ValueError (field, value, rule) for what cannot be had; what was built by then is closed.
    """
    kind = Kind(model=model, layout=cache.layout)
    built: list[Connector] = []
    try:
        for name in config.names:
            built.append(_build(name, config, cache, kind, rank))
    except BaseException:
        for connector in built:
            connector.close()
        raise
    return tuple(built)


def _build(name: str, config: KvConfig, cache: PageBytes, kind: Kind, rank: int) -> Connector:
    if name == "host":
        return HostConnector(cache, max_bytes=config.kv_host_bytes)
    if name == "file":
        return FileConnector(cache, folder=Path(config.kv_path), kind=kind)
    terms = PeerTerms(protocol=name, kind=kind, config=config, rank=rank)
    return PeerConnector(cache, terms, make_mover=MOVERS[name])

"""Every connector is put through the same paces, over caches of several kinds."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from runtime.kv.kv_conformance import Ends, check_connector
from runtime.kv.kv_pages import PageBytes
from runtime.requests.kv_config import KvConfig
from runtime.settings.kv_connectors import build_connectors

torch.set_num_threads(1)
pytestmark = pytest.mark.timeout(120)

NAMES = [
    "host",
    "file",
    "tcp",
    pytest.param(
        "nixl",
        marks=pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="there is no package nixl here"),
    ),
]


class Pages:
    """A cache as connectors see it: plain latents, or rows of bytes as in fp8."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.pages = torch.zeros(shape, dtype=dtype)


def caches() -> Iterator[PageBytes]:
    yield PageBytes(Pages((2, 8, 4, 5), torch.float64))
    yield PageBytes(Pages((3, 9, 16, 41), torch.uint8))


def config(name: str, folder: Path) -> KvConfig:
    return KvConfig(kv_connector=name, kv_path=str(folder) if name == "file" else "")


@pytest.mark.parametrize("name", NAMES)
def test_a_connector_brings_what_was_given_or_nothing(name: str, tmp_path: Path):
    for given in caches():
        taken = given if name == "host" else PageBytes(Pages(given._pages_LNPX.shape, given._pages_LNPX.dtype))
        [giver] = build_connectors(config(name, tmp_path), given, model="m", rank=0)
        [taker] = [giver] if name == "host" else build_connectors(config(name, tmp_path), taken, model="m", rank=1)
        check_connector(Ends(giver=giver, given=given, taker=taker, taken=taken))


def test_a_missing_package_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    def nowhere(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("runtime.kv.kv_nixl.importlib.import_module", nowhere)
    with pytest.raises(ValueError, match=r"needs the package nixl .*serried\[nixl\]"):
        build_connectors(KvConfig(kv_connector="nixl"), next(caches()), model="m", rank=0)


def test_a_port_in_use_is_told_and_what_was_built_is_closed():
    cache = next(caches())
    [first] = build_connectors(KvConfig(kv_connector="tcp"), cache, model="m", rank=0)
    with pytest.raises(ValueError, match="cannot be listened on"):
        build_connectors(KvConfig(kv_connector="host,tcp", kv_port=first.port), cache, model="m", rank=0)
    first.close()


def test_the_host_tier_drops_what_was_asked_for_longest_ago():
    cache = next(caches())
    [tier] = build_connectors(
        KvConfig(kv_connector="host", kv_host_bytes=2 * cache.page_bytes), cache, model="m", rank=0
    )
    for page, digest in enumerate((b"a", b"b")):
        tier.save(digest, page)
    tier.save(b"a", 0)
    tier.save(b"c", 2)
    assert list(tier._pages) == [b"a", b"c"]
    with pytest.raises(ValueError, match="kv_host_bytes is 3; a page takes"):
        build_connectors(KvConfig(kv_connector="host", kv_host_bytes=3), cache, model="m", rank=0)

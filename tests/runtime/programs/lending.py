"""An engine that lends one prompt and sends its pages slowly, to be killed meanwhile.

Reads JSON (protocol, model, shape of the cache, number of tokens, identity, seconds a page) from its only argument,
writes the params of the prompt, a line, and a line for each page that leaves.
"""

import json
import sys
import time

import torch

from runtime.kv.connector import Kept
from runtime.kv.kv_pages import PageBytes
from runtime.requests.kv_config import KvConfig
from runtime.settings.kv_connectors import build_connectors


def tell(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


class Cache:
    def __init__(self, shape: list[int]) -> None:
        self.pages = torch.ones(shape, dtype=torch.float64)


class SlowPages(PageBytes):
    def take(self, pages):
        tell("page")
        time.sleep(asked["page_s"])
        return super().take(pages)


asked = json.loads(sys.argv[1])
cache = SlowPages(Cache(asked["shape"]))
[connector] = build_connectors(KvConfig(kv_connector=asked["protocol"]), cache, model=asked["model"], rank=0)
pages = tuple(range(-(-asked["num_tokens"] // cache.page_size)))
lent = connector.lend(
    Kept(
        request_id="p",
        num_tokens=asked["num_tokens"],
        pages=pages,
        sums=tuple(cache.sums(pages, asked["num_tokens"]).tolist()),
        identity=bytes.fromhex(asked["identity"]),
    )
)
tell(json.dumps(lent.params.as_json()))
time.sleep(60)

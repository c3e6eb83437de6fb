"""One rank of a node in a process of its own: loads folders of weights, and prints what it read and holds, as JSON.

python -m tests.runtime.load_node RANK RANKS SOCKET_DESCRIPTOR FOLDER...
"""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from moe import spread
from runtime.model.model_config import read_model_config
from runtime.weights.checkpoint import open_checkpoint
from runtime.weights.node_loading import LoadedRank, load_rank
from runtime.weights.node_share import NodePeers
from runtime.weights.startup import KernelReads
from tests.runtime.checkpoints import held_bytes
from tests.runtime.peers import digest, peers_over_socket


def main(rank: int, size: int, descriptor: int, folders: list[Path]) -> None:
    torch.set_num_threads(1)
    peers = peers_over_socket(rank, size, socket.socket(fileno=descriptor))
    sys.stdout.write(json.dumps([load(folder, peers) for folder in folders]))


def load(folder: Path, peers: NodePeers) -> dict[str, Any]:
    before, resident = KernelReads.now(), resident_bytes()
    model = read_model_config(folder)
    assert model.moe is not None
    placement = spread(model.moe.num_experts, peers.size)
    source = open_checkpoint(folder, model, turn=(peers.place, peers.size))
    loaded = load_rank(source, model, placement, peers=peers, dtype=model.dtype)
    after = KernelReads.now()
    assert before is not None
    assert after is not None
    return {
        "read": after.since(before).bytes,
        "calls": loaded.report.kernel.calls if loaded.report.kernel else None,
        "own": source.bytes_read,
        "node": loaded.report.node_bytes,
        "seconds": loaded.report.node_seconds,
        "held": held_bytes(loaded.weights),
        "private": resident_bytes() - resident,
        "digest": digest(loaded.weights),
        "memory": mapped_at(loaded),
    }


def mapped_at(loaded: LoadedRank) -> str:
    """Permissions, device and inode of the memory that the embedding lies in."""
    address = loaded.weights.embed_VD.data_ptr()
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, device, inode, *_ = line.split()
        first, last = (int(end, 16) for end in span.split("-"))
        if first <= address < last:
            return f"{permissions} {device} {inode}"
    raise RuntimeError("the embedding is nowhere")


def resident_bytes() -> int:
    """Memory of this process alone: anonymous, not what it shares."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon line")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), [Path(folder) for folder in sys.argv[4:]])

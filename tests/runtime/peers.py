"""Ranks of a node that meet: as threads of the test, or as processes around a hub that the test keeps.

Also a digest of all weights of a rank, so that processes can be compared.
"""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, is_dataclass
from typing import TypeVar

import torch
from torch import Tensor

from runtime.weights.node_share import ROW_WIDTH, NodePeers

X = TypeVar("X")
_ROW = struct.Struct(f"<{ROW_WIDTH}q")


def run_threads(size: int, work: Callable[[NodePeers], X]) -> list[X | Exception]:
    """What `work` returned or raised on each of `size` ranks."""
    barrier = threading.Barrier(size, timeout=20)
    rows: list[list[int]] = [[] for _ in range(size)]

    def gather(rank: int, row: Sequence[int]) -> list[list[int]]:
        barrier.wait()
        rows[rank] = list(row)
        barrier.wait()
        return list(rows)

    def run(rank: int) -> X | Exception:
        try:
            return work(NodePeers(ranks=tuple(range(size)), rank=rank, gather=lambda row: gather(rank, row)))
        except Exception as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def peers_over_socket(rank: int, size: int, link: socket.socket) -> NodePeers:
    """A process's way to the hub."""

    def gather(row: Sequence[int]) -> list[list[int]]:
        link.sendall(_ROW.pack(*row))
        matrix = _receive(link, size * _ROW.size)
        return [list(row) for row in _ROW.iter_unpack(matrix)]

    return NodePeers(ranks=tuple(range(size)), rank=rank, gather=gather)


def keep_hub(links: Sequence[socket.socket]) -> None:
    """Pass rows on until the ranks hang up."""
    try:
        while True:
            matrix = b"".join(_receive(link, _ROW.size) for link in links)
            for link in links:
                link.sendall(matrix)
    except OSError:
        for link in links:
            link.close()


def _receive(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = link.recv(size - len(data))
        if not piece:
            raise ConnectionError("the other end hung up")
        data += piece
    return data


def digest(weights: object) -> str:
    """Over dtype, shape and bytes of every tensor of a tree of dataclasses and tuples."""
    found = hashlib.sha256()
    for tensor in tensors_of(weights):
        found.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        found.update(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def tensors_of(node: object) -> list[Tensor]:
    """In the order of the tree."""
    if isinstance(node, Tensor):
        return [node]
    if is_dataclass(node):
        return [tensor for field in fields(node) for tensor in tensors_of(getattr(node, field.name))]
    if isinstance(node, tuple):
        return [tensor for child in node for tensor in tensors_of(child)]
    return []

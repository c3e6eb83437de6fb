"""Transports over torch.distributed: gloo between processes on CPUs, NCCL between GPUs. And the store where they meet.

gloo carries the letters of `mail`. Its own collectives are not used: when a rank is out of step and sends more than
others expect, gloo ends their processes without naming it; and they know no fp8.

NCCL carries plain collectives. NOBODY HAS RUN IT: it was written on a machine without a GPU, where its class passes the
checks over gloo's collectives and `_open_nccl` has never been executed. Out of step ranks are found by the header of an
exchange and by all_gather only; between GPUs a wait orders streams and does not stop the host.

Every socket listens on the address of the named interface and nowhere else. NCCL opens its own sockets: the launcher
names their interface in NCCL_SOCKET_IFNAME. IPv4 only. The store does not ask who connects, so it belongs on loopback
or on a network of one's own.

Legend: R ranks.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  # public by its documentation
from torch.distributed.distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from .errors import TagMismatch, TransportError
from .mail import MailTransport
from .symmetric import name_group
from .tags import check_tags
from .transport import Pending, Tag, Transport, assert_fit
from .wire import Bytes, Channel, Lost

EMPTY_CHANNEL = len(Channel)
"""Nobody ever sends on it."""


def open_torch_dist(
    *,
    rank: int,
    size: int,
    backend: str,
    store: Store,
    interface: str = "lo",
    device: torch.device | str = "cpu",
    comm_sms: int = 0,
    timeout_s: float = 600.0,
) -> Transport:
    """This rank's end of a group of `size`; returns when all are connected. All ranks call it, with the same store.

    backend: gloo (CPU tensors, over `interface`) or nccl (tensors of `device`). comm_sms: multiprocessors that NCCL may
    take, 0 as many as it likes. timeout_s: longest start, and longest single wait. A store serves one group of each
    backend. ValueError for a backend that is not there; TransportError when not all come.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend = {backend!r}: must be one of {', '.join(BACKENDS)}, for example gloo")
    store = PrefixStore(f"serried/{backend}", store)
    try:
        opening = Opening(rank, size, store, interface, torch.device(device), comm_sms, timedelta(seconds=timeout_s))
        return BACKENDS[backend](opening)
    except RuntimeError as error:
        raise TransportError(f"{backend} does not connect {size} ranks: {_words(error)}", rank=rank) from error


def open_store(
    host: str,
    port: int | None,
    *,
    rank: int,
    size: int,
    interface: str = "lo",
    listener: socket.socket | None = None,
    timeout_s: float = 60.0,
) -> TCPStore:
    """The store where ranks meet. Rank 0 serves it, on `listener` or on a new one of listen(interface, port).

    port None: rank 0 takes a free one, and the others are told store.port. host: where the others find rank 0.
    TransportError when nobody answers there within timeout_s.
    """
    limit = timedelta(seconds=timeout_s)
    try:
        if rank == 0:
            listener = listener or listen(interface, port or 0)
            address, number = listener.getsockname()
            served = listener.detach()
            return TCPStore(address, number, size, True, timeout=limit, wait_for_workers=False, master_listen_fd=served)
        assert port is not None, "a rank other than 0 must know the port"
        return TCPStore(host, port, size, False, timeout=limit)
    except dist.DistError as error:
        raise TransportError(f"no store at {host}:{port} within {timeout_s:g} s: {_words(error)}", rank=rank) from error


def listen(interface: str, port: int = 0) -> socket.socket:
    """A socket that listens on the interface's address alone; port 0: a free one. ValueError for one that is taken."""
    address = address_of(interface)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
    except OSError as error:
        listener.close()
        raise ValueError(f"port = {port}: is taken on {address}; 0 takes a free one ({error})") from error
    listener.listen(1024)
    return listener


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface: lo -> 127.0.0.1. ValueError if there is none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("256s", interface.encode()[:15])
        try:
            answer = fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            message = f"interface = {interface!r}: must be one with an IPv4 address, of {names}, for example lo"
            raise ValueError(message) from error
    return socket.inet_ntoa(answer[20:24])


_SIOCGIFADDR = 0x8915
"""linux/sockios.h: get an interface's address, bytes 20 to 24 of struct ifreq."""


@dataclass(frozen=True, slots=True, eq=False)
class _GlooWork:
    peer: int
    work: dist.Work

    def wait(self, limit_s: float | None = None) -> None:
        try:
            if limit_s is None:
                self.work.wait()
            else:
                self.work.wait(timedelta(seconds=max(limit_s, 1e-3)))  # 0 means for ever
        except RuntimeError as error:
            raise Lost(self.peer, _words(error)) from error


class GlooWire:
    """`wire.Wire` over the point to point messages of a gloo group, which must serve nothing else."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self.rank = group.rank()
        self.size = group.size()
        self._group: Any = group  # torch's stubs leave out what a backend sends and receives with

    def send(self, peer: int, data: Bytes, channel: Channel) -> _GlooWork:
        return self._start(self._group.send, peer, data, channel)

    def receive(self, peer: int, into: Bytes, channel: Channel) -> _GlooWork:
        return self._start(self._group.recv, peer, into, channel)

    def _start(
        self, call: Callable[[list[Tensor], int, int], dist.Work], peer: int, data: Bytes, channel: Channel
    ) -> _GlooWork:
        try:
            return _GlooWork(peer, call([torch.from_numpy(data)], peer, channel))
        except RuntimeError as error:
            raise Lost(peer, _words(error)) from error

    def sever(self) -> None:
        """gloo's abort() and shutdown() do nothing. It does close all connections when a wait takes too long."""
        for peer in range(self.size):
            if peer != self.rank:
                with suppress(RuntimeError):  # that wait, and those for connections that are closed
                    nothing = self._group.recv([torch.empty(1, dtype=torch.uint8)], peer, EMPTY_CHANNEL)
                    nothing.wait(timedelta(milliseconds=1))


class TorchDistTransport:
    """One rank's end of a group over a backend's collectives; see `transport.Transport`. Meant for NCCL.

    Rows travel as bytes, so every dtype does. all_to_all carries no tag; all_gather carries it in band, which needs
    the host to read it.
    """

    def __init__(self, process_group: Any, *, device: torch.device | str) -> None:
        """process_group: a backend of torch.distributed, whose stubs leave out the collectives. For this use only."""
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._group = process_group
        self._device = device
        self._ended: str | None = None

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        assert_fit(recv, send, recv_splits=recv_splits, send_splits=send_splits, size=self.size)
        into, out_of = _rows(recv), _rows(send)
        splits = list(recv_splits), list(send_splits)
        finish = self._start(tag, lambda: self._group.alltoall_base(into, out_of, *splits))
        return Pending(finish).then(lambda _: recv)

    def all_gather(self, row: Tensor, *, tag: Tag) -> Pending[Tensor]:
        words = torch.tensor(tag, dtype=torch.int64, device=self._device)
        message_1B = torch.cat([words.view(torch.uint8), row.contiguous().reshape(-1).view(torch.uint8)])[None]
        with torch.inference_mode(False):
            heard_RB = torch.empty(self.size, message_1B.shape[1], dtype=torch.uint8, device=self._device)
        finish = self._start(tag, lambda: self._group._allgather_base(heard_RB, message_1B))

        def check(_: None) -> Tensor:
            tags = heard_RB[:, : words.nbytes].contiguous().view(torch.int64).tolist()
            try:
                check_tags([tuple(words) for words in tags], rank=self.rank)
            except TagMismatch as error:
                self._ended = str(error)
                raise
            with torch.inference_mode(False):
                rows_RB = heard_RB[:, words.nbytes :].contiguous()
            return rows_RB.view(row.dtype).reshape(self.size, *row.shape)

        return Pending(finish).then(check)

    def _start(self, tag: Tag, collective: Callable[[], dist.Work]) -> Callable[[], None]:
        if self._ended is not None:
            raise TransportError(f"no more exchanges: {self._ended}", rank=self.rank, step=tag.step)

        def fail(error: RuntimeError) -> TransportError:
            return TransportError(f"{tag} failed: {_words(error)}", rank=self.rank, step=tag.step)

        try:
            work = collective()
        except RuntimeError as error:
            raise fail(error) from error

        def finish() -> None:
            try:
                work.wait()
            except RuntimeError as error:
                raise fail(error) from error

        return finish

    @property
    def num_communicators(self) -> int:
        """Opened so far: the one of the start, and any that were split off it."""
        splits = getattr(self._group, "comm_split_count", None)
        return 1 + (splits() if splits is not None else 0)

    def abort(self, cause: BaseException) -> None:
        """Other ranks are not told: they hang until their own watch of this rank ends them."""
        self._ended = f"aborted after {type(cause).__name__}: {cause}"
        self._group.abort()

    def close(self) -> None:
        if self._ended is None:
            self._ended = "closed"
            self._group.shutdown()


def num_communicators(transport: Transport) -> int:
    """Those that a transport has opened so far; only NCCL may open more after the start."""
    return transport.num_communicators if isinstance(transport, TorchDistTransport) else 1


def _rows(rows: Tensor) -> Tensor:
    """[rows, bytes of a row], the same memory."""
    assert rows.is_contiguous(), rows.stride()
    return rows.detach().reshape(rows.shape[0], rows.shape[1:].numel()).view(torch.uint8)


def _words(error: BaseException) -> str:
    """The first sentence, without the place in torch's source: [pair.cc:553] Connection closed by peer. This is .."""
    line = str(error).strip().split("\n", 1)[0]
    return re.sub(r"^\[\S+:\d+\] ", "", line).split(". ", 1)[0]


def gloo_group(
    rank: int, size: int, store: Store, interface: str, _device: torch.device, limit: timedelta
) -> ProcessGroupGloo:
    """A gloo group of its own, outside torch's global state, whose sockets are on the interface."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # its name in the stubs is not its name
    options._devices = [ProcessGroupGloo.create_device(hostname=address_of(interface))]
    options._timeout = limit
    options._threads = 1  # for collectives; point to point messages take none
    return ProcessGroupGloo(store, rank, size, options)


class Opening(NamedTuple):
    """What a group is opened with."""

    rank: int
    size: int
    store: Store
    interface: str
    device: torch.device
    comm_sms: int
    limit: timedelta


def _open_gloo(asked: Opening) -> Transport:
    rank, size, store, interface, device, _, limit = asked
    return MailTransport(GlooWire(gloo_group(rank, size, store, interface, device, limit)))


def _open_nccl(asked: Opening) -> Transport:
    if not dist.is_nccl_available() or not torch.cuda.is_available():
        lacks = "a CUDA device" if dist.is_nccl_available() else "NCCL, which the CUDA builds of torch bring along"
        raise ValueError(f"backend = 'nccl': torch {torch.__version__} here lacks {lacks}; gloo runs on CPUs")
    options = _nccl_options(dist.ProcessGroupNCCL.Options(), comm_sms=asked.comm_sms, limit=asked.limit)
    group = dist.ProcessGroupNCCL(asked.store, asked.rank, asked.size, options)
    group.eager_connect_single_device(asked.device)  # no new communicator after the start
    name_group(asked.rank, asked.size, PrefixStore("symmetric", asked.store))
    return TorchDistTransport(group, device=asked.device)


def _nccl_options(options: Any, *, comm_sms: int, limit: timedelta) -> Any:
    """NCCL takes a multiprocessor a channel; an exchange is sends, whose channels it rounds up to a power of two, so
    the most that it may take is rounded down to one: 20 -> 16. NCCL_MAX_CTAS, where a user sets it, stands above this.
    """
    options._timeout = limit
    options.is_high_priority_stream = True  # rows before local work
    if comm_sms:
        options.config.max_ctas = 1 << (comm_sms.bit_length() - 1)
    return options


BACKENDS: dict[str, Callable[[Opening], Transport]] = {"gloo": _open_gloo, "nccl": _open_nccl}

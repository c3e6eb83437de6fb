"""Graphs without a device that has any: torch's operations are noted as they run, and run again on the same memory.

What a CUDA graph would burn in is burnt in here: the host's numbers, shapes, and the tensors themselves. What a CUDA
graph could not record raises HostTouched: values read by the host (`.item()`, `.tolist()`, `bool(tensor)`), tensors
made from the host's numbers, and results whose shape follows from values. Triton's kernels, which the interpreter runs,
are noted as launches, exchanges as what begins them and what waits for them. Ranks that are threads have a device each.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ep import Pending, Tag, Transport
from ep.wrapping import Wrapping

aten = torch.ops.aten
HOST_READS = {"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"}
BY_VALUE = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.is_nonzero, aten.equal, aten.bincount,
    aten._unique2, aten.unique_dim, aten.unique_consecutive,
}  # fmt: skip
FROM_HOST = {aten.lift_fresh, aten.lift_fresh_copy}
EMPTY = {aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}


class HostTouched(RuntimeError):
    """A graph cannot record this."""


class PretendGraph:
    """Noted calls."""

    def __init__(self, device: PretendGraphs) -> None:
        self.calls: list[Callable[[], None]] = []
        self._device = device

    def replay(self) -> None:
        """All calls again; results go to where they were."""
        for call in self.calls:
            self._device.now_ns += self._device.call_ns
            call()


class PretendGraphs:
    """A `GraphDevice`. Recording does the work as well: memory is as it is after a first replay."""

    def __init__(self) -> None:
        """num_graphs: recorded so far. most_bytes: that work held at one time while it was rehearsed. now_ns: a clock,
        which goes on by `call_ns` with each call of a replay."""
        self.num_graphs = 0
        self.most_bytes = 0
        self._held_bytes = 0
        self.now_ns, self.call_ns = 0, 1000
        self._functions, self._calls = _Functions(self), _Calls(self)
        self.graph: PretendGraph | None = None
        self.paused = False

    def lane(self) -> Any:
        return _Made(self)

    def begin(self) -> None:
        assert self.graph is None
        self.graph = PretendGraph(self)
        _note_launches()
        _THREAD.device = self
        self._functions.__enter__()
        self._calls.__enter__()

    def end(self) -> PretendGraph:
        graph, self.graph = self.graph, None
        assert graph is not None
        self._calls.__exit__(None, None, None)
        self._functions.__exit__(None, None, None)
        _THREAD.device = None
        self.num_graphs += 1
        return graph

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens now is not noted: it is a part of something that is."""
        before, self.paused = self.paused, True
        try:
            yield
        finally:
            self.paused = before

    def carry(self, transport: Transport) -> Transport:
        """Rows that travel as something that is noted too."""
        return _Carried(transport, self)

    def do(self, call: Callable[[], None]) -> None:
        """Now, and in every replay: something that is no operation."""
        with self.pause():
            call()
        if self.graph is not None:
            self.note(call)

    def add(self, cell: Tensor, sign: int) -> None:
        """A `DeviceClock`."""
        self.do(lambda: cell.add_(sign * self.now_ns))

    def made(self, out: Any) -> None:
        """Count what an operation made for as long as somebody holds it."""
        for each in tree_leaves(out):
            if isinstance(each, Tensor) and each._base is None:
                num_bytes = each.untyped_storage().nbytes()
                self._held_bytes += num_bytes
                self.most_bytes = max(self.most_bytes, self._held_bytes)
                weakref.finalize(each.untyped_storage(), self._let_go, num_bytes)

    def _let_go(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes

    def note(self, call: Callable[[], None]) -> None:
        """One more call."""
        assert self.graph is not None
        self.graph.calls.append(call)


class _Functions(TorchFunctionMode):
    """Python's own reads of values, which run no operation."""

    def __init__(self, device: PretendGraphs) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if not self._device.paused and name in HOST_READS:
            raise HostTouched(f"the host reads a tensor in a captured step: {name}")
        return func(*args, **(kwargs or {}))


class _Calls(TorchDispatchMode):
    """Torch's operations."""

    def __init__(self, device: PretendGraphs) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self._device.paused:
            return func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in BY_VALUE:
            raise HostTouched(f"{func}: its result depends on values, in a captured step")
        if packet in FROM_HOST:
            raise HostTouched(f"{func}: a tensor is made of the host's numbers in a captured step")
        if packet in (aten.index, aten.index_put, aten.index_put_) and _has_masks(args[1]):
            raise HostTouched(f"{func}: a mask chooses how many, in a captured step")
        out = func(*args, **kwargs)
        if packet not in EMPTY:
            self._device.note(lambda: _again(func, args, kwargs, out))
        return out


class _Made(TorchDispatchMode):
    """What is made where nothing is recorded, for notes hold all that they were given."""

    def __init__(self, device: PretendGraphs) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self._device.graph is None and not _is_written_to(func):
            self._device.made(out)
        return out


def _has_masks(indices: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The same call; what it made anew is copied to where the first result lies."""
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and (old.data_ptr() != new.data_ptr() or old.stride() != new.stride()):
            assert old.shape == new.shape, f"{func}: {tuple(new.shape)}, recorded {tuple(old.shape)}"
            old.copy_(new)


def _is_written_to(func: Any) -> bool:
    """Whether it returns a view, or what it was given."""
    return any(each.alias_info is not None for each in func._schema.returns)


_THREAD = threading.local()
"""`device`: which one records in this thread."""


def _note_launches() -> None:
    """Triton's interpreter reads and writes memory behind torch's back: a launch is noted as a whole."""
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__
    if hasattr(original, "notes"):
        return

    def launch(executor, *args, **kwargs):
        device = getattr(_THREAD, "device", None)
        if device is None or device.paused:
            original(executor, *args, **kwargs)
            return
        device.note(lambda: original(executor, *args, **kwargs))
        with device.pause():
            original(executor, *args, **kwargs)

    launch.notes = True
    GridExecutor.__call__ = launch


class _Carried(Wrapping):
    """A transport whose exchanges are recorded. Steps are no concern of a network: a replay says none."""

    def __init__(self, transport: Transport, device: PretendGraphs) -> None:
        super().__init__(transport)
        self._device = device

    def all_to_all(
        self, recv: Tensor, send: Tensor, *, recv_splits: Sequence[int], send_splits: Sequence[int], tag: Tag
    ) -> Pending[Tensor]:
        splits = {"recv_splits": recv_splits, "send_splits": send_splits, "tag": tag._replace(step=0)}
        under_way: list[Pending[Tensor]] = []

        def begin() -> None:
            under_way.append(self._transport.all_to_all(recv, send, **splits))

        def finish() -> None:
            under_way.pop().wait()

        def wait() -> Tensor:
            self._device.do(finish)
            return recv

        self._device.do(begin)
        return Pending(wait)

"""Graphs without a device that has any: torch's operations are noted as they run, and run again on the same memory.

What a CUDA graph would burn in is burnt in here: the host's numbers, shapes, and the tensors themselves. What a CUDA
graph could not record raises HostTouched: values read by the host (`.item()`, `.tolist()`, `bool(tensor)`), tensors
made from the host's numbers, and results whose shape follows from values. Triton's kernels, which the interpreter runs,
are noted as launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        """All calls again; results go to where they were."""
        for call in self.calls:
            call()


class PretendGraphs:
    """A `GraphDevice`. Recording does the work as well: memory is as it is after a first replay."""

    def __init__(self) -> None:
        self.num_graphs = 0
        self._functions, self._calls = _Functions(self), _Calls(self)
        self.graph: PretendGraph | None = None
        self.paused = False

    def lane(self) -> Any:
        return nullcontext()

    def begin(self) -> None:
        assert self.graph is None
        self.graph = PretendGraph()
        self._launches = _noted_launches(self)
        self._launches.__enter__()
        self._functions.__enter__()
        self._calls.__enter__()

    def end(self) -> PretendGraph:
        graph, self.graph = self.graph, None
        assert graph is not None
        self._calls.__exit__(None, None, None)
        self._functions.__exit__(None, None, None)
        self._launches.__exit__(None, None, None)
        self.num_graphs += 1
        return graph

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What happens now is not noted: it is a part of something that is."""
        before, self.paused = self.paused, True
        yield
        self.paused = before

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


def _has_masks(indices: Any) -> bool:
    return any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)


def _again(func: Any, args: Any, kwargs: Any, out: Any) -> None:
    """The same call; what it made anew is copied to where the first result lies."""
    for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
        if isinstance(old, Tensor) and (old.data_ptr() != new.data_ptr() or old.stride() != new.stride()):
            assert old.shape == new.shape, f"{func}: {tuple(new.shape)}, recorded {tuple(old.shape)}"
            old.copy_(new)


@contextmanager
def _noted_launches(device: PretendGraphs) -> Iterator[None]:
    """Triton's interpreter reads and writes memory behind torch's back: a launch is noted as a whole."""
    from triton.runtime.interpreter import GridExecutor

    original = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        def run() -> None:
            with device.pause():
                original(executor, *args, **kwargs)

        if device.graph is not None and not device.paused:
            device.note(lambda: original(executor, *args, **kwargs))
        run()

    GridExecutor.__call__ = launch
    try:
        yield
    finally:
        GridExecutor.__call__ = original

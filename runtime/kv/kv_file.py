"""Pages as safetensors files in a folder that engines share: one file a page, named by what it holds.

    FOLDER / <model>-<layout> / <digest>.safetensors     tensor "page": uint8 [L, Y]; metadata: digest, sum

The name of the inner folder keeps pages of other models and of other layouts apart, so that engines of both kinds may
share the outer one. A file is written whole under another name and then renamed: what can be found is complete. A
thread writes and reads, so that no step waits for a disk; when it is behind, pages are not written at all.

Whoever may write to the folder is trusted as the model's files are: it is made for this user alone.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from .connector import Kept, KvLoadError, Landed, Want
from .kv_pages import Kind, PageBytes

MAX_BEHIND = 256
"""Pages that wait to be written, at most."""


class FileConnector:
    """See `connector.Connector`. Raises ValueError for a folder that cannot be made."""

    def __init__(self, cache: PageBytes, *, folder: Path, kind: Kind) -> None:
        self._cache = cache
        self._folder = folder / f"{kind.model}-{kind.layout}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"kv_path is {str(folder)!r}; {error.strerror}: it must be a folder to write to"
            ) from error
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-file")
        self._behind = threading.Semaphore(MAX_BEHIND)
        self.num_dropped = 0

    def path(self, digest: bytes) -> Path:
        """Where a page is."""
        return self._folder / f"{digest.hex()}.safetensors"

    def find(self, want: Want) -> FileLoad | None:
        """For the protocol see `connector.Connector`."""
        paths = []
        for digest in want.digests:
            path = self.path(digest)
            if not path.exists():
                break
            paths.append(path)
        return FileLoad(self, paths, num_tokens=len(paths) * self._cache.page_size) if paths else None

    def save(self, digest: bytes, page: int) -> None:
        """For the protocol see `connector.Connector`."""
        path = self.path(digest)
        if path.exists():
            return
        if not self._behind.acquire(blocking=False):
            self.num_dropped += 1
            return
        [copy_LY] = self._cache.take([page])
        [total] = self._cache.sums([page], self._cache.page_size).tolist()
        self._pool.submit(self._write, path, copy_LY, {"digest": digest.hex(), "sum": str(total)})

    def start(self, paths: Sequence[Path]) -> Future[Landed]:
        """Read these pages."""
        return self._pool.submit(self._read, paths)

    def lend(self, kept: Kept) -> None:
        """Nothing: who shares the folder finds the pages by what they hold."""

    def close(self) -> None:
        """For the protocol see `connector.Connector`; what is to be written is."""
        self._pool.shutdown()

    def _write(self, path: Path, bytes_LY: Tensor, about: dict[str, str]) -> None:
        draft = path.with_name(f".{path.stem}.{os.getpid()}.{threading.get_ident()}")
        try:
            save_file({"page": bytes_LY.contiguous()}, draft, metadata=about)
            draft.rename(path)
        except (OSError, SafetensorError):  # a full disk costs a copy, no request
            self.num_dropped += 1
            with contextlib.suppress(OSError):
                draft.unlink()
        finally:
            self._behind.release()

    def _read(self, paths: Sequence[Path]) -> Landed:
        pages, sums = [], []
        for path in paths:
            page_LY, total = self._read_one(path)
            pages.append(page_LY)
            sums.append(total)
        return Landed(sums=sums, bytes_NLY=torch.stack(pages))

    def _read_one(self, path: Path) -> tuple[Tensor, int]:
        shape = (self._cache.num_layers, self._cache.layer_bytes)
        try:
            with safe_open(path, framework="pt") as file:
                about, page_LY = file.metadata() or {}, file.get_tensor("page")
            total = int(about["sum"])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise KvLoadError(f"{path.name} cannot be read: {error}") from error
        if about.get("digest") != path.stem or page_LY.dtype != torch.uint8 or tuple(page_LY.shape) != shape:
            raise KvLoadError(f"{path.name} holds something else than its name and its folder say")
        return page_LY, total


class FileLoad:
    """See `connector.Load`."""

    def __init__(self, store: FileConnector, paths: Sequence[Path], *, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        self._store = store
        self._paths = paths
        self._reading: Future[Landed] | None = None
        self._cancelled = False

    def begin(self, *, skip: int, pages: Sequence[int]) -> None:
        """For the protocol see `connector.Load`."""
        self._paths = self._paths[skip:]
        assert len(pages) == len(self._paths), f"{len(pages)} pages for {len(self._paths)} files"
        self._reading = self._store.start(self._paths)

    def poll(self) -> Landed | None:
        """For the protocol see `connector.Load`."""
        if self._cancelled:  # the thread reads into memory of its own
            raise KvLoadError("it was cancelled")
        if self._reading is None or not self._reading.done():
            return None
        try:
            return self._reading.result()
        except KvLoadError:
            self.cancel()
            raise

    def cancel(self) -> None:
        """For the protocol see `connector.Load`. What was read, and is not wanted for it, is not read again."""
        self._cancelled = True
        if self._reading is not None and self._reading.done():
            for path in self._paths:
                path.unlink(missing_ok=True)

"""The transport over MPI (mpi4py), for ranks that mpirun started. Importing this module needs mpi4py and an MPI.

MPI carries the letters of `mail`, in its own communicator, with upper-case calls only: bytes of buffers, never pickled
objects. Between processes of one node Open MPI uses shared memory. It then opens no socket, and does not notice a rank
that vanishes: that is for whoever watches the processes.

Legend: R ranks.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections import deque
from dataclasses import dataclass

from .errors import TransportError
from .mail import MailTransport
from .wire import Bytes, Channel, Lost

try:
    import mpi4py

    mpi4py.rc.initialize = False  # open_mpi starts MPI, not an import
    mpi4py.rc.finalize = True  # at the end of the process, if it was started
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py is here, libmpi is not
    raise ImportError(f"the mpi transport needs mpi4py and an MPI: pip install 'serried[mpi]' ({error})") from error

ONE_NODE = {"pml": "ob1", "btl": "self,sm"}
"""Open MPI's parameters for shared memory and nothing else. By default it listens on every interface."""


def open_mpi(*, parameters: dict[str, str] | None = None) -> MailTransport:
    """This rank's end of the group that mpirun started; returns when all are there.

    `parameters` (of Open MPI, for example ONE_NODE) are set before MPI starts, except those that were set already
    by the user, in OMPI_MCA_* or with mpirun --mca. TransportError if the library refuses one.
    """
    if not MPI.Is_initialized():
        if parameters and MPI.get_vendor()[0] == "Open MPI":
            _set_parameters(parameters)
        MPI.Init_thread(MPI.THREAD_SERIALIZED)
    return mpi_transport(MPI.COMM_WORLD)


def mpi_transport(comm: MPI.Intracomm) -> MailTransport:
    """This rank's end of the group of `comm`, whose ranks all call this. Letters go through a duplicate of it."""
    return MailTransport(MpiWire(comm))


def _set_parameters(parameters: dict[str, str]) -> None:
    """Through MPI's tool interface, the one way in that is open before MPI starts and is not the environment.

    The MPI standard (4.1), chapter Tool Support: control variables.
    """
    library = ctypes.CDLL(MPI.__file__)
    level = ctypes.c_int()
    _check(library.MPI_T_init_thread(MPI.THREAD_SINGLE, ctypes.byref(level)), "MPI_T_init_thread")
    for name, value in parameters.items():
        index, count, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
        _check(library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index)), name)
        _check(library.MPI_T_cvar_handle_alloc(index, None, ctypes.byref(handle), ctypes.byref(count)), name)
        held = ctypes.create_string_buffer(max(count.value, len(value)) + 1)
        _check(library.MPI_T_cvar_read(handle, held), name)
        if not held.value:
            held.value = value.encode()
            _check(library.MPI_T_cvar_write(handle, held), name)


def _check(code: int, what: str) -> None:
    if code != MPI.SUCCESS:
        raise TransportError(f"MPI refuses to set its parameter {what}: error {code}")


@dataclass(frozen=True, slots=True, eq=False)
class _MpiWork:
    peer: int
    request: MPI.Request

    def wait(self, limit_s: float | None = None) -> None:
        """Spins, like all of MPI; lets other processes run in between. The interpreter is free for other threads."""
        try:
            if limit_s is None:
                self.request.Wait()
                return
            deadline = time.monotonic() + limit_s
            while not self.request.Test():
                if time.monotonic() > deadline:
                    raise Lost(self.peer, f"no answer within {limit_s:.2g} s")
                os.sched_yield()
        except MPI.Exception as error:
            raise Lost(self.peer, error) from error


class MpiWire:
    """`wire.Wire` over a duplicate of `comm`, so that no letter of anybody else is taken for one of ours."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self._receives: deque[MPI.Request] = deque()

    def send(self, peer: int, data: Bytes, channel: Channel) -> _MpiWork:
        try:
            return _MpiWork(peer, self._comm.Isend((data, MPI.BYTE), peer, channel))
        except MPI.Exception as error:
            raise Lost(peer, error) from error

    def receive(self, peer: int, into: Bytes, channel: Channel) -> _MpiWork:
        try:
            request = self._comm.Irecv((into, MPI.BYTE), peer, channel)
        except MPI.Exception as error:
            raise Lost(peer, error) from error
        self._receives.append(request)
        while self._receives[0] == MPI.REQUEST_NULL:  # waited for
            self._receives.popleft()
        return _MpiWork(peer, request)

    def sever(self) -> None:
        """Take back the receives, so that MPI can end. The duplicate goes with MPI: freeing it would need all ranks."""
        while self._receives:
            request = self._receives.pop()
            if request != MPI.REQUEST_NULL:
                request.Cancel()
                request.Wait()

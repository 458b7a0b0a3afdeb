"""NCCL through ctypes: one rank of a communicator that torch does not know.

torch's own NCCL group cannot join ranks that torch did not make, such as those of an engine's own transfer calls, and it does
not end when it is aborted. The library is the one that torch has loaded. The communicator is non-blocking: each call
returns, and this module waits for its end. After `abort`, every call and every wait raises, whatever the other side
does.
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

from .stock import ID_BYTES, TRAINER

_SUCCESS, _IN_PROGRESS = 0, 7
_UINT8, _FLOAT32, _SUM = 1, 7, 0
_CONFIG_MAGIC, _CONFIG_VERSION, _UNDEFINED = 0xCAFEBEEF, 21400, -(1 << 31)
"""The first layout of ncclConfig_t that has non-blocking communicators; later libraries fill in the fields that came
after.
"""
_POLL_S = 0.00005
_LOCK_S = 0.5


class NcclError(Exception):
    """An NCCL call failed, or the communicator was aborted: what was done, and why."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * ID_BYTES)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_size_t),
        ("magic", ctypes.c_uint),
        ("version", ctypes.c_uint),
        ("blocking", ctypes.c_int),
        ("cluster_size", ctypes.c_int),
    ]


class Library:
    """The library libnccl. `path` is by default the library that torch has loaded."""

    def __init__(self, path: str = "libnccl.so.2") -> None:
        try:
            self._calls = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError(f"{path} cannot be loaded ({error}): torch is not built for CUDA") from None
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        arguments: dict[str, list[Any]] = {
            "ncclGetVersion": [pointer],
            "ncclGetUniqueId": [pointer],
            "ncclCommInitRankConfig": [pointer, number, _UniqueId, number, pointer],
            "ncclCommGetAsyncError": [pointer, pointer],
            "ncclAllReduce": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclBroadcast": [pointer, pointer, size, number, number, pointer, pointer],
            "ncclSend": [pointer, size, number, number, pointer, pointer],
            "ncclRecv": [pointer, size, number, number, pointer, pointer],
            "ncclCommAbort": [pointer],
        }
        for name, types in arguments.items():
            getattr(self._calls, name).argtypes = types
        self._calls.ncclGetErrorString.restype = ctypes.c_char_p

    def call(self, name: str, *arguments: Any) -> int:
        """Call a function and return its status, which is success or in progress. Raises NcclError for every other
        status.
        """
        code = int(getattr(self._calls, name)(*arguments))
        self.check(code, name)
        return code

    def check(self, code: int, what: str) -> None:
        """Check a status code. Raises NcclError when it is an error of `what`."""
        if code not in (_SUCCESS, _IN_PROGRESS):
            raise NcclError(f"{what}: {self._calls.ncclGetErrorString(code).decode()} ({code}), NCCL {self.version()}")

    def version(self) -> int:
        """Return NCCL's version as a number: 22809 is 2.28.9. Both sides must have the same."""
        found = ctypes.c_int()
        self._calls.ncclGetVersion(ctypes.byref(found))
        return found.value

    def unique_id(self) -> bytes:
        """Return the id of a new communicator, for whoever is to join it."""
        made = _UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made)


class Communicator:
    """One rank of a communicator, from `join` on.

    Any one thread may call `abort`. One other thread calls the rest, with the communicator's GPU as its current CUDA
    device.
    """

    def __init__(self, library: Library) -> None:
        self._library = library
        self._handle = ctypes.c_void_p()
        self._aborted = ""
        self._lock = threading.Lock()

    def join(self, unique_id: bytes, world: int, rank: int = TRAINER) -> None:
        """Wait until all `world` ranks are there."""
        name = _UniqueId.from_buffer_copy(unique_id)
        config = _Config(ctypes.sizeof(_Config), _CONFIG_MAGIC, _CONFIG_VERSION, 0, _UNDEFINED)
        self._do("ncclCommInitRankConfig", ctypes.byref(self._handle), world, name, rank, ctypes.byref(config))

    def all_reduce(self, address: int, stream: int) -> None:
        """Queue the sum of one float32 over all ranks, in place."""
        self._do("ncclAllReduce", address, address, 1, _FLOAT32, _SUM, self._handle, stream)

    def broadcast(self, address: int, size: int, stream: int) -> None:
        """Queue the broadcast of `size` bytes to all ranks."""
        self._do("ncclBroadcast", address, address, size, _UINT8, TRAINER, self._handle, stream)

    def send(self, address: int, size: int, rank: int, stream: int) -> None:
        """Queue a message of `size` bytes to a rank, which must receive exactly as many."""
        self._do("ncclSend", address, size, _UINT8, rank, self._handle, stream)

    def recv(self, address: int, size: int, rank: int, stream: int) -> None:
        """Queue the receiving of a message of `size` bytes from a rank."""
        self._do("ncclRecv", address, size, _UINT8, rank, self._handle, stream)

    def settled(self, what: str) -> bool:
        """Return whether the last call has ended. Raises NcclError if it failed, or if work under way failed."""
        state = ctypes.c_int()
        with self._lock:
            self._require(what)
            self._library.call("ncclCommGetAsyncError", self._handle, ctypes.byref(state))
        self._library.check(state.value, what)
        return state.value == _SUCCESS

    def abort(self, reason: str) -> None:
        """End whatever the communicator does, here and on the GPU, even when a call hangs inside NCCL."""
        self._aborted = reason
        held = self._lock.acquire(timeout=_LOCK_S)
        try:
            if self._handle:
                self._library.call("ncclCommAbort", self._handle)
        finally:
            if held:
                self._lock.release()

    def _do(self, name: str, *arguments: Any) -> None:
        with self._lock:
            self._require(name)
            self._library.call(name, *arguments)
        while not self.settled(name):
            time.sleep(_POLL_S)

    def _require(self, what: str) -> None:
        if self._aborted:
            raise NcclError(f"{what}: aborted, {self._aborted}")

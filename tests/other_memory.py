"""A direct push between processes without a GPU: an opened handle is a window on another process's memory.

`OtherPort` is `contracts.Port` on both sides. The kernel reads what is copied out of the process that a handle names, so
nothing is shared but the offer. A window's addresses belong to no memory of this process, and a process that has ended, or was
never opened, cannot be read.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import Any

from torch import Tensor

from artd_workers.transfer.contracts import DeviceError

from .direct_rig import MemoryPort, MemoryQueue

_WINDOW = 1 << 44
"""Bytes between two windows; no process has memory at such addresses."""
_FIRST = 1 << 56
_LIBC = ctypes.CDLL(None, use_errno=True)


class _Bytes(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("size", ctypes.c_size_t)]


class OtherPort(MemoryPort):
    def __init__(self) -> None:
        super().__init__()
        self._windows: dict[int, tuple[int, int]] = {}

    def share(self, tensor: Tensor) -> tuple[bytes, int, int]:
        storage = tensor.untyped_storage()
        return struct.pack("<qq", os.getpid(), storage.data_ptr()), storage.data_ptr(), storage.nbytes()

    def open(self, handle: bytes) -> int:
        base = _FIRST + len(self._windows) * _WINDOW
        self._windows[base] = struct.unpack("<qq", handle)
        self.opened.append(base)
        return base

    def queue(self) -> MemoryQueue:
        return _OtherQueue(self)

    def read(self, to: int, source: int, size: int) -> None:
        """Copy from a window. Raises DeviceError."""
        base = source - (source - _FIRST) % _WINDOW
        if base not in self.opened:
            raise DeviceError(f"{source:#x} is in no open window")
        pid, begin = self._windows[base]
        here, there = _Bytes(to, size), _Bytes(begin + source - base, size)
        got: Any = _LIBC.process_vm_readv(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if got != size:
            raise DeviceError(f"process {pid} cannot be read: {os.strerror(ctypes.get_errno())}")


class _OtherQueue(MemoryQueue):
    def __init__(self, port: OtherPort) -> None:
        self._port = port

    def copy(self, to: int, source: int, size: int) -> None:
        if source >= _FIRST:
            return self._port.read(to, source, size)
        return super().copy(to, source, size)

    def copy2d(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        for row in range(rows):
            self.copy(to + row * pitch, source + row * width, width)

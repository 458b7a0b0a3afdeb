"""`transfer.contracts.Wire` without NCCL: a Unix socket between two processes, or two ends in one.

It behaves as badly as NCCL over NVLink: it does not notice the end of the other side, and waits until it is aborted. It owns a
socket, a thread that works through the queue, and a watchdog.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import queue
import socket
import threading
import time
from typing import Any

import torch
from torch import Tensor

from artd_workers.transfer.nccl.communicator import NcclError
from artd_workers.transfer.nccl.stock import ID_BYTES, TRAINER
from artd_workers.transfer.nccl.watchdog import Watchdog

_NAMES = itertools.count()


class Place:
    def __init__(self, wire: PlainWire, number: int) -> None:
        self._wire, self._number = wire, number

    def done(self) -> bool:
        return self._wire.worked >= self._number or bool(self._wire.reason)  # an abort ends NCCL's kernels


class PlainWire:
    """log: (what, bytes) of everything queued."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._socket: socket.socket | None = None
        self._listener: socket.socket | None = None
        self._queued = self.worked = 0
        self.log: list[tuple[str, int]] = []
        self.joined = False
        self.watchdog = Watchdog(self._bite)

    @property
    def reason(self) -> str:
        return self.watchdog.reason

    def name(self) -> bytes:
        name = f"\0artd-test-{os.getpid()}-{next(_NAMES)}"  # of no file
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(name)
        self._listener.listen()
        return name.encode().ljust(ID_BYTES, b"\0")

    def within(self, seconds: float) -> contextlib.AbstractContextManager[None]:
        return self.watchdog.within(seconds)

    def join(self, name: bytes, rank: int) -> None:
        path = name.rstrip(b"\0").decode()
        met: Any = None
        while not met:
            self.check()
            with contextlib.suppress(OSError):  # nobody is there yet, or it was aborted
                if self._socket is None:
                    self._socket = self._accept() if rank == TRAINER else self._connect(path)
                self._socket.settimeout(0.01)
                met = self._socket.send(b"!") if rank == TRAINER else self._socket.recv(1)
            time.sleep(0.001)
        assert self._socket is not None
        with contextlib.suppress(OSError):  # it was aborted just now
            self._socket.settimeout(None)
        self.check()
        threading.Thread(target=self._work, daemon=True).start()
        self.joined = True

    def _accept(self) -> socket.socket:
        assert self._listener is not None
        self._listener.settimeout(0.01)
        return self._listener.accept()[0]

    def _connect(self, path: str) -> socket.socket:
        one = socket.socket(socket.AF_UNIX)
        try:
            one.connect(path)
        except BaseException:
            one.close()
            raise
        return one

    def memory(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.uint8)

    def use(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def send(self, address: int, size: int) -> None:
        self._put("send", address, size)

    def recv(self, address: int, size: int) -> None:
        self._put("recv", address, size)

    def mark(self) -> Place:
        return Place(self, self._queued)

    def check(self) -> None:
        if self.reason:
            raise NcclError(f"aborted, {self.reason}")

    def abort(self, reason: str) -> None:
        self.watchdog.bark(reason)

    def close(self) -> None:
        self.watchdog.end("it was closed")

    def _put(self, what: str, address: int, size: int) -> None:
        self.check()
        self._queued += 1
        self.log.append((what, size))
        self._queue.put((what, address, size))

    def _work(self) -> None:
        """Until the socket is shut; then nothing is ever done."""
        assert self._socket is not None
        while (item := self._queue.get()) is not None:
            what, address, size = item
            view: Any = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
            with contextlib.suppress(OSError):
                if what == "send":
                    self._socket.sendall(view)
                else:
                    at = 0
                    while at < size and (n := self._socket.recv_into(view[at:])):
                        at += n
                    if at < size:
                        return
                self.worked += 1
                continue
            return

    def _bite(self, _: str) -> None:
        self._queue.put(None)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()
        if self._listener is not None:
            self._listener.close()

"""Message channels between rank 0 and one other rank, which work while both are inside a job.

`Channel` is one end; both ends are alike. It owns two threads of its process. `send` never waits, whatever the other
side does. Messages arrive in the order in which they were sent. Each side hears exactly once that the other process
has ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch
import torch.distributed as dist


class Channel:
    """One end of the connection to rank `other`.

    `take` is called in a thread of the channel: with each message, and with None when no further message can come. It
    must not wait.
    """

    def __init__(self, group: dist.ProcessGroup | None, other: int, take: Callable[[bytes | None], None]) -> None:
        self._group, self._other, self._take = group, other, take
        self._out: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"{name}-rank-{other}", daemon=True)
            for name, work in (("to", self._write), ("from", self._read))
        ]
        for thread in self._threads:
            thread.start()

    def send(self, data: bytes) -> None:
        """Queue `data`, which must not be empty. Any thread may call this."""
        self._out.put(data)

    def close(self) -> None:
        """Stop sending, and return when the other side has stopped too or has ended."""
        self._out.put(b"")
        for thread in self._threads:
            thread.join()

    def _write(self) -> None:
        while True:
            data = self._out.get()
            try:
                dist.send(torch.tensor(len(data)), self._other, self._group)
                if not data:
                    return
                dist.send(torch.frombuffer(bytearray(data), dtype=torch.uint8), self._other, self._group)
            except RuntimeError:
                return  # the other process has ended; `_read` reports that

    def _read(self) -> None:
        while (data := self._next()) is not None:
            self._take(data)
        self._take(None)

    def _next(self) -> bytes | None:
        size = torch.zeros((), dtype=torch.int64)
        try:
            dist.recv(size, self._other, self._group)
            if not int(size):
                return None
            data = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(data, self._other, self._group)
        except RuntimeError:
            return None
        return data.numpy().tobytes()

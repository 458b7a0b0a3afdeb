"""The part of ranks 1 and up in pushes: each does what rank 0 orders, beside its own jobs.

`Member` follows the orders of `team.py`. For each pair it owns a thread, a folder and a `LocalPart`. An order waits
only for earlier orders of its own pair, and `Abort` waits for none. Every Open and Give gets an answer.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from artd_workers.deadline import Deadline
from artd_workers.trainer.push.ways import Unable

from .pair import LocalPart
from .team import Abort, Answer, Close, Ended, Give, Line, Open, Opened, Order
from .weight_source import WeightSource


class Member:
    """The end of a rank other than 0. `line` is the channel to rank 0; the caller sets it, and lets it call `take`."""

    line: Line

    def __init__(self, rank: int, weight_source: WeightSource) -> None:
        self._rank, self._weight_source = rank, weight_source
        self._parts: dict[str, _Part] = {}

    def take(self, data: bytes | None) -> None:
        """Handle rank 0's next order, or None when rank 0 has ended."""
        if data is None:
            for part in self._parts.values():
                part.take(Close(""))
            self._parts.clear()
            return
        order = msgspec.msgpack.decode(data, type=Order)
        if isinstance(order, Open):
            folder = Path(order.pair)
            self._parts[order.pair] = _Part(
                folder.with_name(f"{folder.name}.{self._rank}"), self._weight_source, self._answer
            )
        if (found := self._parts.get(order.pair)) is not None:
            found.take(order)
        if isinstance(order, Close):
            self._parts.pop(order.pair, None)

    def _answer(self, answer: Answer) -> None:
        self.line.send(msgspec.msgpack.encode(answer))


class _Part:
    """The part of this rank in one pair. `folder`: its folder for the pair, which does not exist yet."""

    def __init__(self, folder: Path, weight_source: WeightSource, answer: Callable[[Answer], None]) -> None:
        self._local, self._weight_source, self._answer = LocalPart(folder), weight_source, answer
        self._orders: queue.SimpleQueue[Open | Give | Close] = queue.SimpleQueue()
        threading.Thread(target=self._follow, name="push-part", daemon=True).start()

    def take(self, order: Order) -> None:
        if isinstance(order, Abort | Close):
            self._local.abort()
        if not isinstance(order, Abort):
            self._orders.put(order)

    def _follow(self) -> None:
        if self._weight_source.device.type == "cuda":
            torch.cuda.set_device(self._weight_source.device)  # a new thread starts on GPU 0
        while not isinstance(order := self._orders.get(), Close):
            self._answer(self._open(order) if isinstance(order, Open) else self._give(order))
        self._local.close()

    def _open(self, order: Open) -> Opened:
        try:
            return Opened(order.pair, self._local.open(self._weight_source))
        except Unable as error:
            return Opened(order.pair, None, str(error))
        except Exception as error:
            return Opened(order.pair, None, f"{type(error).__name__}: {error}")

    def _give(self, order: Give) -> Ended:
        deadline = Deadline(order.seconds)
        try:
            with self._weight_source.weight_lock.read(order.version, deadline, self._local.abort):
                self._local.feed(order.fence, deadline)
        except Exception as error:
            return Ended(order.pair, order.fence, f"{type(error).__name__}: {error}")
        return Ended(order.pair, order.fence)

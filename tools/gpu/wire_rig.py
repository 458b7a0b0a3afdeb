"""The trainer and the engine of `tools.gpu.push`, with a connection in the place of shared memory.

Owner of: the connection. Invariants: a push that failed ends it, and `connect` makes the next. met: seconds until the trainer has
joined.
"""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from artd_schema.wire.direct import EngineTable, Offer
from artd_workers.trainer.push.direct.feeder import Feeder
from artd_workers.transfer.contracts import Port, Wire
from artd_workers.transfer.nccl.communicator import NcclError
from artd_workers.transfer.nccl.stock import TRAINER
from tools.gpu.push_rig import TIMEOUT_S, Line, Rig
from tools.gpu.push_trainer import Trainer


class Sent:
    """A trainer whose source sends; all else is the trainer's. alike: what `Trainer.open` says of itself, by CUDA IPC."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.wire: Wire | None = None
        self.alike: Line = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def open(self, table: EngineTable, port: Port, folder: Path, **buffers: int) -> Line:
        """Also by CUDA IPC, which is offered in another folder."""
        (folder / "ipc").mkdir(exist_ok=True)
        self.alike = self._trainer.open(table, port, folder / "ipc", **buffers)
        self.shared = self._trainer.feeder
        self._port, self._folder, self._table = port, folder, table
        self.connect()
        return self.alike | {"turns": len(self.offer.feeds[0].units)}

    def connect(self) -> None:
        """A new connection, and its offer."""
        trainer = self._trainer
        weight_source = trainer.served.weight_source
        self.wire = self._port.wire()
        trainer.feeder = Feeder(weight_source, weight_source.plan(self._table), self._folder, self.wire)
        self.offer: Offer = trainer.feeder.offer()

    def join(self) -> None:
        assert self.wire is not None
        with contextlib.suppress(NcclError), self.wire.within(TIMEOUT_S):  # the engine's side says so too
            self.wire.join(self.offer.feeds[0].nccl, TRAINER)

    def feed(self, fence: int, timeout_s: float) -> None:
        """Raises TimeoutError for whatever ends it: the rig takes it that the engine refused."""
        if self._trainer.feeder is self.shared:
            return self._trainer.feed(fence, timeout_s)
        assert self.wire is not None
        try:
            with self.wire.within(timeout_s):
                self._trainer.feed(fence, timeout_s)
        except NcclError as error:
            raise TimeoutError(str(error)) from error


@dataclass
class WireRig(Rig):
    """See `push_rig.Rig`. shared: the pushes are by CUDA IPC now."""

    shared: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.trainer = Sent(self.trainer)

    def open(self, offer: Offer) -> Line:
        if self.shared:
            return super().open(offer)
        trainer: Any = self.trainer
        joining, began = threading.Thread(target=trainer.join), time.perf_counter()
        joining.start()
        try:
            line = super().open(offer)
        except BaseException:
            trainer.wire.abort("the engine did not open the offer")
            raise
        finally:
            joining.join()
        return line | {"met": time.perf_counter() - began}

    def connect(self, change: bool = True) -> Line:
        """A new connection in the place of one that has ended; ready for a push."""
        self.disconnect()
        self.trainer.connect()  # type: ignore[attr-defined]
        line = self.open(self.trainer.offer)
        self.prepare(change)
        return line

    def reopen(self) -> None:
        """Over a new connection."""
        self.shared = False
        self.connect(False)

    def disconnect(self) -> None:
        if (wire := self.trainer.wire) is not None:  # type: ignore[attr-defined]
            wire.close()

    def share(self) -> Line:
        """From now on by CUDA IPC."""
        self.disconnect()
        self.shared = True
        sent: Any = self.trainer
        sent._trainer.feeder = sent.shared
        return self.open(sent._trainer.offer)

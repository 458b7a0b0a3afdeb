"""The direct push over NCCL: a pair of trainer and engine that uses the plan and the offer of `pair.py` but shards no
memory.

`NcclWay` is the `ways.Way` of such a pair. It owns the pair's folder with the offer, its `Feeder`, and the trainer's
end of the connection. A push that fails ends the connection. The engine cannot always see that (its receive waits for
ever), so the way raises Broken. All else is as in `pair.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from artd_schema.wire.direct import OFFER, Plan
from artd_schema.wire.worker import Push
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.trainer.push.ways import Broken, Unable
from artd_workers.transfer.contracts import Wire
from artd_workers.transfer.nccl.communicator import NcclError

from .feeder import Feeder, write_offer
from .pair import make_engine_plan
from .weight_source import WeightSource

log = logging.getLogger(__name__)


class NcclWay:
    """The pair at `rendezvous`, a folder that does not exist yet. The engine's table is beside it."""

    def __init__(self, rendezvous: str) -> None:
        self._folder = Path(rendezvous)
        self._open: tuple[Feeder, Wire] | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def prepare(self, snapshot: Snapshot) -> None:
        if self._open is not None:
            return
        if (weight_source := snapshot.weight_source) is None:
            raise Unable("the trainer serves copies in its machine's memory, which no plan is made for")
        started = time.monotonic()
        plan = make_engine_plan(self._folder, weight_source)
        try:
            source, wire = _open_wire(weight_source, plan, self._folder)
        except NcclError as error:
            raise Unable(str(error)) from None
        write_offer(source.offer(), self._folder / OFFER)
        with self._lock:
            self._open = source, wire
            if self._aborted:
                wire.abort("the push has ended")
        log.info("offer over NCCL in %s written in %.2f s", self._folder, time.monotonic() - started)

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        assert self._open is not None, "prepare comes first"
        source, wire = self._open
        try:
            with wire.within(deadline.left):
                source.feed(message.fence, deadline)
        except Exception as error:
            if wire.joined or self._aborted:
                raise Broken(str(error)) from error
            raise Unable(f"the engine was not met over NCCL: {error}") from error

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._open is not None:
                self._open[1].abort("the push has ended")

    def close(self) -> None:
        if self._open is not None:
            self._open[0].close()


def _open_wire(weight_source: WeightSource, plan: Plan, folder: Path) -> tuple[Feeder, Wire]:
    wire = weight_source.port.wire()
    try:
        return Feeder(weight_source, plan, folder, wire), wire
    except BaseException:
        wire.close()
        raise

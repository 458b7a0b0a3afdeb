"""A pair of trainer and engine by the direct push: the engine's table becomes a plan, the plan an offer, a push a feed.

Purpose: `Direct` is `ways.Way` for `push.Pusher`. Owner of: the pair's folder with page and offer, and its `Source`. Invariants:
nothing is offered for an engine whose table no plan covers; the offer is whole when its name appears.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.direct import OFFER, TABLE, EngineTable
from artd_schema.worker import Push

from ...engines.base import Deadline
from ...engines.direct.cover import CoverError
from ...engines.direct.device import DeviceError
from ..snapshot import Snapshot
from ..ways import Unable
from .holdings import Holdings
from .plan import PlanError, make_plan
from .source import Source, write_offer

log = logging.getLogger(__name__)


class Direct:
    """rendezvous: the pair's folder, not there yet; the engine's table lies beside it."""

    def __init__(self, rendezvous: str) -> None:
        self._folder = Path(rendezvous)
        self._source: Source | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def prepare(self, snapshot: Snapshot) -> None:
        if self._source is not None:
            return
        if snapshot.holdings is None:
            raise Unable("the trainer serves copies in its machine's memory, which an engine cannot pull")
        started = time.monotonic()
        source = _open(self._folder, snapshot.holdings)
        with self._lock:
            self._source = source
            if self._aborted:
                source.abort()
        log.info("offer in %s written in %.2f s", self._folder, time.monotonic() - started)

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        assert self._source is not None, "prepare comes first"
        self._source.feed(message.fence, deadline)

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
            if self._source is not None:
                self._source.abort()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()


def _open(folder: Path, holdings: Holdings) -> Source:
    table = _read(folder.parent / TABLE)
    dtypes = sorted({tensor.dtype for tensor in table.tensors} - {holdings.dtype_name})
    if dtypes:
        raise Unable(f"the engine holds {dtypes[0]}, and the run's engine.dtype is {holdings.dtype_name}")
    try:
        plan = make_plan(table, holdings.codec, holdings.shapes, holdings.dtype.itemsize)
    except (PlanError, CoverError) as error:
        raise Unable(str(error)) from None
    folder.mkdir(mode=0o700)
    source = Source(holdings, plan, folder)
    try:
        write_offer(source.offer(), folder / OFFER)
    except DeviceError as error:
        source.close()
        raise Unable(str(error)) from None
    return source


def _read(path: Path) -> EngineTable:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=EngineTable)
    except FileNotFoundError:
        raise Unable(f"{path} is missing: the engine has written no table, or is gone") from None
    except UNREADABLE as error:
        raise Unable(f"{path} is not an engine's table: {error}") from None

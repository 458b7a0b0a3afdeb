"""The direct push: a pair of trainer and engine, from the engine's table over the plan to the offer and its pushes.

`DirectWay` is the `ways.Way` of the pair; `LocalPart` is one process's part of it. The pair owns its folder, with
page and offer, and its `Feeder`. An engine gets an offer only if the plans of all processes together cover its table.
The offer is complete when its name appears. A push ends here only when it has ended on all processes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from artd_schema.codec import UNREADABLE
from artd_schema.wire.direct import OFFER, TABLE, EngineTable, Feed, Offer, Plan
from artd_schema.wire.worker import Push
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.trainer.push.ways import Unable
from artd_workers.transfer.contracts import DeviceError
from artd_workers.transfer.coverage import CoverError

from .feeder import Aborted, Feeder, write_offer
from .plan import PlanError, check_coverage
from .weight_source import WeightSource

if TYPE_CHECKING:
    from .team import PeerParts, Team

log = logging.getLogger(__name__)
END_S = 5.0
"""Seconds that other processes get to end a push that has failed here."""


class LocalPart:
    """One process's part of a pair: its page and what it feeds.

    `folder` is the pair's folder, which does not exist yet; the engine's table is beside it. One thread at a time uses
    a part; only `abort` may come from any thread.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._feeder: Feeder | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def open(self, weight_source: WeightSource) -> Feed:
        """Return this process's part of the offer. Raises Unable."""
        source = Feeder(weight_source, make_engine_plan(self._folder, weight_source), self._folder)
        try:
            feed = source.own_feed()
        except DeviceError as error:
            source.close()
            raise Unable(str(error)) from None
        with self._lock:
            self._feeder = source
            if self._aborted:
                source.abort()
        return feed

    def feed(self, fence: int, deadline: Deadline) -> None:
        """Feed one push; see `Feeder.feed`."""
        assert self._feeder is not None, "open comes first"
        self._feeder.feed(fence, deadline)

    def abort(self) -> None:
        """End whatever waits, and feed nothing any more. Any thread, at any time."""
        with self._lock:
            self._aborted = True
            if self._feeder is not None:
                self._feeder.abort()

    def close(self) -> None:
        if self._feeder is not None:
            self._feeder.close()
            self._feeder = None


class DirectWay:
    """The pair at `rendezvous`, a folder that does not exist yet. The engine's table is beside it.

    If several processes give the weights, each creates its own folder beside it, and this process speaks to the engine
    for all of them.
    """

    def __init__(self, rendezvous: str) -> None:
        self._folder = Path(rendezvous)
        self._local = LocalPart(self._folder)
        self._peers: PeerParts | None = None
        self._offered = self._aborted = False
        self._lock = threading.Lock()

    def prepare(self, snapshot: Snapshot) -> None:
        if self._offered:
            return
        weight_source = snapshot.weight_source
        if weight_source is None:
            raise Unable("the trainer serves copies in its machine's memory, which an engine cannot pull")
        started = time.monotonic()
        if snapshot.team is not None:
            self._join(snapshot.team)
        try:
            offer = self._offer(weight_source)
        except BaseException:
            self.close()
            raise
        write_offer(offer, self._folder / OFFER)
        self._offered = True
        log.info("offer in %s written in %.2f s", self._folder, time.monotonic() - started)

    def _join(self, team: Team) -> None:
        with self._lock:
            self._peers = team.pair(str(self._folder), self.abort)
            self._peers.begin()
            if self._aborted:
                self._peers.abort()

    def _offer(self, weight_source: WeightSource) -> Offer:
        feeds = (self._local.open(weight_source), *(self._peers.await_feeds() if self._peers is not None else ()))
        offer = Offer(itemsize=weight_source.dtype.itemsize, parts=tuple(weight_source.model), feeds=feeds)
        if self._peers is not None:
            runs = [run for feed in feeds for unit in feed.units for run in unit.runs]
            sizes = [math.prod(shape) for shape in weight_source.model.values()]
            try:
                check_coverage(_read_table(self._folder.parent / TABLE), offer.parts, sizes, runs)
            except CoverError as error:
                raise Unable(str(error)) from None
        return offer

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        others = self._peers
        if others is None:
            return self._local.feed(message.fence, deadline)
        others.give(snapshot.version, message.fence, deadline)
        try:
            self._local.feed(message.fence, deadline)
        except Exception as error:
            before = others.error
            others.abort()
            others.await_end(END_S)
            if before:
                raise Aborted(before) from error
            raise
        try:
            wrong = others.await_end(deadline.left)
        except TimeoutError:
            others.abort()
            others.await_end(END_S)
            raise
        if wrong:
            raise Aborted(wrong)
        return None

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        self._local.abort()
        if self._peers is not None:
            self._peers.abort()

    def close(self) -> None:
        self._local.close()
        if self._peers is not None:
            self._peers.close()


def make_engine_plan(folder: Path, weight_source: WeightSource) -> Plan:
    """Create the pair's folder, and return the plan for the engine whose table is beside it. Raises Unable."""
    table = _read_table(folder.parent / TABLE)
    dtypes = sorted({tensor.dtype for tensor in table.tensors} - {weight_source.dtype_name})
    if dtypes:
        raise Unable(f"the engine holds {dtypes[0]}, and the run's engine.dtype is {weight_source.dtype_name}")
    try:
        plan = weight_source.plan(table)
    except (PlanError, CoverError) as error:
        raise Unable(str(error)) from None
    folder.mkdir(mode=0o700)
    return plan


def _read_table(path: Path) -> EngineTable:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=EngineTable)
    except FileNotFoundError:
        raise Unable(f"{path} is missing: the engine has written no table, or is gone") from None
    except UNREADABLE as error:
        raise Unable(f"{path} is not an engine's table: {error}") from None

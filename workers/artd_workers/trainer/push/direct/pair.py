"""A pair of trainer and engine by the direct push: the engine's table becomes a plan, the plan an offer, a push a feed.

Purpose: `Direct` is `ways.Way` for `push.Pusher`, `Giver` one process's part of it. Owner of: the pair's folder with page and offer,
and its `Source`. Invariants: nothing is offered for an engine whose table no plan covers, or not those of all processes together; the
offer is whole when its name appears; a push ends here when it has ended on all processes.
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
from artd_schema.direct import OFFER, TABLE, EngineTable, Feed, Offer, Plan
from artd_schema.worker import Push
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.snapshot import Snapshot
from artd_workers.trainer.push.ways import Unable
from artd_workers.transfer.contracts import DeviceError
from artd_workers.transfer.coverage import CoverError

from .holdings import Holdings
from .plan import PlanError, check_whole
from .source import Aborted, Source, write_offer

if TYPE_CHECKING:
    from .team import Others, Team

log = logging.getLogger(__name__)
END_S = 5.0
"""Seconds that other processes get to end a push that has failed here."""


class Giver:
    """One process's part of a pair: its page and what it feeds. folder: not there yet; the engine's table lies beside it. But for
    `abort`, one thread at a time calls it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._source: Source | None = None
        self._lock = threading.Lock()
        self._aborted = False

    def open(self, holdings: Holdings) -> Feed:
        """What this process offers. Raises Unable."""
        source = Source(holdings, planned(self._folder, holdings), self._folder)
        try:
            feed = source.given()
        except DeviceError as error:
            source.close()
            raise Unable(str(error)) from None
        with self._lock:
            self._source = source
            if self._aborted:
                source.abort()
        return feed

    def feed(self, fence: int, deadline: Deadline) -> None:
        """As `Source.feed`."""
        assert self._source is not None, "open comes first"
        self._source.feed(fence, deadline)

    def abort(self) -> None:
        """End what waits, at any time and from any thread; nothing is fed any more."""
        with self._lock:
            self._aborted = True
            if self._source is not None:
                self._source.abort()

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


class Direct:
    """rendezvous: the pair's folder, not there yet; the engine's table lies beside it. Where several processes give the weights,
    each makes a folder beside it, and this one speaks for all."""

    def __init__(self, rendezvous: str) -> None:
        self._folder = Path(rendezvous)
        self._giver = Giver(self._folder)
        self._others: Others | None = None
        self._offered = self._aborted = False
        self._lock = threading.Lock()

    def prepare(self, snapshot: Snapshot) -> None:
        if self._offered:
            return
        holdings = snapshot.holdings
        if holdings is None:
            raise Unable("the trainer serves copies in its machine's memory, which an engine cannot pull")
        started = time.monotonic()
        if snapshot.team is not None:
            self._join(snapshot.team)
        try:
            offer = self._offer(holdings)
        except BaseException:
            self.close()
            raise
        write_offer(offer, self._folder / OFFER)
        self._offered = True
        log.info("offer in %s written in %.2f s", self._folder, time.monotonic() - started)

    def _join(self, team: Team) -> None:
        with self._lock:
            self._others = team.pair(str(self._folder), self.abort)
            self._others.begin()
            if self._aborted:
                self._others.abort()

    def _offer(self, holdings: Holdings) -> Offer:
        feeds = (self._giver.open(holdings), *(self._others.opened() if self._others is not None else ()))
        offer = Offer(itemsize=holdings.dtype.itemsize, parts=tuple(holdings.model), feeds=feeds)
        if self._others is not None:
            runs = [run for feed in feeds for unit in feed.units for run in unit.runs]
            sizes = [math.prod(shape) for shape in holdings.model.values()]
            try:
                check_whole(_read(self._folder.parent / TABLE), offer.parts, sizes, runs)
            except CoverError as error:
                raise Unable(str(error)) from None
        return offer

    def send(self, message: Push, snapshot: Snapshot, deadline: Deadline) -> None:
        others = self._others
        if others is None:
            return self._giver.feed(message.fence, deadline)
        others.give(snapshot.version, message.fence, deadline)
        try:
            self._giver.feed(message.fence, deadline)
        except Exception as error:
            before = others.error
            others.abort()
            others.ended(END_S)
            if before:
                raise Aborted(before) from error
            raise
        try:
            wrong = others.ended(deadline.left)
        except TimeoutError:
            others.abort()
            others.ended(END_S)
            raise
        if wrong:
            raise Aborted(wrong)
        return None

    def abort(self) -> None:
        with self._lock:
            self._aborted = True
        self._giver.abort()
        if self._others is not None:
            self._others.abort()

    def close(self) -> None:
        self._giver.close()
        if self._others is not None:
            self._others.close()


def planned(folder: Path, holdings: Holdings) -> Plan:
    """For the engine whose table lies beside the pair's folder, which is made. Raises Unable."""
    table = _read(folder.parent / TABLE)
    dtypes = sorted({tensor.dtype for tensor in table.tensors} - {holdings.dtype_name})
    if dtypes:
        raise Unable(f"the engine holds {dtypes[0]}, and the run's engine.dtype is {holdings.dtype_name}")
    try:
        plan = holdings.plan(table)
    except (PlanError, CoverError) as error:
        raise Unable(str(error)) from None
    folder.mkdir(mode=0o700)
    return plan


def _read(path: Path) -> EngineTable:
    try:
        return msgspec.msgpack.decode(path.read_bytes(), type=EngineTable)
    except FileNotFoundError:
        raise Unable(f"{path} is missing: the engine has written no table, or is gone") from None
    except UNREADABLE as error:
        raise Unable(f"{path} is not an engine's table: {error}") from None

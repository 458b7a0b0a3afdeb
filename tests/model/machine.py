"""What the rules of `test_machine` stand on: the services over real rows without processes, and what must hold after every rule.

Owner of: the folder, the loop, the daemon of the moment. Invariants: every write is a service's own; workers are ready rows and
names on a recording wire; a daemon that dies leaves rows and files, nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any
from unittest import mock

import anyio.to_thread
from hypothesis.stateful import RuleBasedStateMachine, invariant

from artd import recover
from artd.check.run import check
from artd.config import Limits, Settings
from artd.errors import RequestError
from artd.net.router import WorkerWire
from artd.packing import service
from artd.runs.lifecycle import _insert
from artd.services import Services
from artd.serving.routing_table import load_table
from artd.store.store import Store
from artd.workforce import Boot
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.fakes.rows import BASE, FIRST, FakeClock, add_worker, data_dir, spec
from tests.fakes.staging import stage
from tests.fakes.steps import pack_here

from .reference import FOLLOWS, Job, Reference
from .virtual import InlineReader, InlineThreads, InlineWriter, VirtualLoop

SHELF = Path("/dev/shm")
STATES = {entity: f"SELECT id, state FROM {entity}" for entity in FOLLOWS}


class Peers:
    """Where the daemon's messages end up: sent, oldest first."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, peer: bytes, message: object, bulk: object = ()) -> bool:
        self.sent.append(message)
        return True

    def take(self, *kinds: type) -> Any:
        """The newest message, which must be of these kinds."""
        assert self.sent and isinstance(self.sent[-1], kinds), self.sent[-3:]
        return self.sent[-1]


class Machine(RuleBasedStateMachine):
    """orders: every Run that was sent; results: manifest shas of what was staged for them, by (job, fence);
    committed: (fence, sha) of a job's step; held: the push under way has asked for the hold."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="artd-machine.", dir=SHELF if SHELF.is_dir() else None))
        self.data = data_dir(self.root)
        self.loop = VirtualLoop()
        self.clock = FakeClock()
        self.spawns = {"trainer": 0, "engine": 0, "gateway": 0}
        self.orders: list[w.Run] = []
        self.results: dict[tuple[int, int], str] = {}
        self.committed: dict[int, tuple[int, str]] = {}
        self.pushes: list[w.Push] = []
        self.ids: dict[str, int] = {}
        self.before: dict[str, dict[Any, str]] = {entity: {} for entity in FOLLOWS}
        self.epochs: dict[int, int] = {}
        self.steps = 0
        self.patches = contextlib.ExitStack()
        self.patches.enter_context(mock.patch.object(service, "run_child", pack_here))
        self.patches.enter_context(
            mock.patch.object(anyio.to_thread, "run_sync", InlineThreads(random.Random(0)).run_sync)
        )
        self.patches.enter_context(
            mock.patch.object(os, "fsync", lambda _: None)
        )  # no test of this folder pulls the plug

    def begin(self, groups_per_step: int, mode: str) -> None:
        """A run whose init job waits."""
        self.spec = spec(groups_per_step=groups_per_step, rollout_weights_mode=mode, keep_checkpoints=2)
        self.model = Reference(2, groups_per_step, int(self.spec.group_timeout_s * 1000), self.clock.ms)
        self.boot()
        self.do(self.store.write(lambda c: _insert(c, self.clock.ms, "r", self.spec, BASE)))
        self.respawn("trainer")
        self.respawn("engine")

    def teardown(self) -> None:
        self.patches.close()
        if hasattr(self, "store"):
            self.close()
        self.loop.close()
        shutil.rmtree(self.root)

    # ---- the daemon -------------------------------------------------------------------------------------------------------

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, None))

    def boot(self) -> None:
        """A daemon with ready workers."""

        async def reader(path: Path) -> InlineReader:
            return InlineReader(path, lambda: 0.0)

        async def start() -> None:
            self.store = Store(
                self.data.database, self.clock, self.fatal, lambda path, fatal: InlineWriter(path, fatal, lambda: 0.0), reader,
                lambda path, count, deadline_s: InlineReader(path, lambda: 0.0),
            )  # fmt: skip
            await self.store.open()
            instance, number = await self.store.write(lambda c: recover.identify(c, self.data, self.clock.ms))
            await recover.recover(self.store, self.data)
            boot = Boot(instance=instance, number=number, code=self.root, endpoint="", token="t")
            self.peers = Peers()
            self.wire = WorkerWire(self.peers)
            limits = Settings(limits=Limits(min_free_mib=1, reserve_mib=0))
            self.services = Services(
                self.store, self.wire, self.data, limits, boot, lambda *_: None, lambda _: None, lambda _: None
            )

        self.do(start())
        self.order: w.Run | None = None
        self.push: w.Push | None = None
        self.held = False
        for kind in self.spawns if self.rows("SELECT 1 FROM run") else ("gateway",):
            self.respawn(kind)

    def close(self) -> None:
        self.store._writer.stop()
        self.do(self.store._reader.close())

    def fatal(self, error: BaseException) -> None:
        raise AssertionError(f"the store failed: {error!r}")

    def respawn(self, kind: str) -> None:
        """A new process of the worker of this kind that is ready."""
        name, old = FIRST[kind], self.spawns[kind]
        self.spawns[kind] += 1
        self.wire.forget(name, old)
        self.do(add_worker(self.store, name, self.spawns[kind], "ready", "/s"))
        self.wire.register(name, self.spawns[kind], name.encode())

    def ask(self, op: api.Op, bulk: list[bytes] | None = None) -> api.Answer | RequestError:
        try:
            return self.do(self.services._requests.serve(op, bulk or []))
        except RequestError as error:
            return error

    def rows(self, sql: str) -> list[Any]:
        return self.do(self.store.read(sql))

    @property
    def job(self) -> Job:
        job = self.model.unfinished
        assert job is not None
        return job

    def stage(self, order: w.Run) -> w.Staged:
        identity = (order.job, order.fence)
        if not Path(order.dir).exists():
            self.results[identity] = stage(Path(order.dir), order, BASE.digest)
        return w.Staged(job=order.job, fence=order.fence, dir=order.dir, manifest_sha=self.results[identity])

    def served(self) -> list[str]:
        """Digests of what is served, oldest first."""
        rows = self.rows(
            "SELECT k.sha FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id WHERE s.state = 'live' ORDER BY s.id"
        )
        return [row["sha"] for row in rows]

    # ---- what always holds ------------------------------------------------------------------------------------------------------

    @invariant()
    def as_the_reference_says(self) -> None:
        if not hasattr(self, "model"):
            return
        self.steps += 1
        model = self.model
        (run,) = self.rows("SELECT state, step, lineage, next_epoch, flush FROM run")
        assert tuple(run)[:3] == (model.state, model.step, model.lineage)
        groups = {
            row["name"]: (row["state"], row["size"])
            for row in self.rows("SELECT name, state, size FROM trajectory_group")
        }
        assert groups == {name: (group.state, len(group.rewards)) for name, group in model.groups.items()}
        jobs = [
            tuple(row)
            for row in self.rows("SELECT kind, step, state, attempts, deaths, not_before FROM job ORDER BY id")
        ]
        for row, job in zip(jobs, model.jobs, strict=True):
            assert row[:5] == (job.kind, job.step, job.state, job.attempts, job.deaths)
            assert row[2] != "queued" or max(row[5], model.now) == max(job.not_before, model.now)
        trained = {row["key"] for row in self.rows("SELECT key FROM trajectory WHERE state = 'trained'")}
        ever = [key for job in model.jobs if job.state == "succeeded" for group in job.groups for key in group.rewards]
        assert trained == set(ever) and len(ever) == len(set(ever))

    @invariant()
    def as_the_check_says(self) -> None:
        if hasattr(self, "model"):
            report = check(self.root)
            assert report.clean, report.broken

    @invariant()
    def the_gateway_s_table_is_true(self) -> None:
        """It names what is live, and admits nothing to an engine from the pause of a push to its end, however it ends."""
        if not hasattr(self, "model"):
            return
        table = self.do(self.store.write(load_table))
        if self.model.state == "finished":
            assert table.engines == ()
            return
        (engine,) = table.engines
        assert engine.hold == (self.push is not None and self.held)
        steps = {row["step"] for row in self.rows("SELECT step FROM checkpoint WHERE abandoned = 0")}
        assert len(engine.served) == len(self.served()) and {each.step for each in engine.served} <= steps

    @invariant()
    def states_follow_legally(self) -> None:
        if not hasattr(self, "model"):
            return
        for entity, sql in STATES.items():
            now = {row[0]: row[1] for row in self.rows(sql)}
            for number, state in now.items():
                before = self.before[entity].get(number, state)
                assert state == before or _may_follow(entity, before, state), f"{entity} {number}: {before} -> {state}"
            assert self.before[entity].keys() <= now.keys(), f"a row of {entity} is gone"
            self.before[entity] = now


def _may_follow(entity: str, before: str, state: str, hops: int = 3) -> bool:
    """By at most `hops` transitions: a rule may be several of the daemon's transactions (`step_comes` seals, packs, trains)."""
    after = FOLLOWS[entity].get(before, "").split()
    return state in after or (hops > 1 and any(_may_follow(entity, between, state, hops - 1) for between in after))

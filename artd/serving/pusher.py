"""Pushes: committed checkpoints go into the engine: hold, update, verify, live.

Owner of: push and serving rows, and the fence of the last push that the gateway was asked to hold for (`push_held`).
Invariants: the step that is served changes only with a verified `Live`; an engine whose push did not end well is unknown
and is restarted, never verified back; at most one push per engine is under way, and only the newest matters; the gateway
holds from the engine's `Pausing` on, and the engine is told to go on only when nothing is admitted any more.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

from artd.core.decide import plan_push
from artd.datadir.layout import DataDir
from artd.health.awake import Awake
from artd.net.router import WorkerWire
from artd.store.store import Store, emit, get_meta, set_meta
from artd.store.views import active_run, load_worker, newest_checkpoint, open_pushes, push_failed, stored_spec
from artd.tables import pauses
from artd.tables.pushes import fail_push, mark_live, mark_sending, prepare_push, retry_push, supersede_push
from artd.tables.served import insert_served, mark_gone
from artd.training.dispatch import TRAINER, checkpoint_ref
from artd_schema import worker as w
from artd_schema.crashpoint import reach

from .transfers import Transfers

log = logging.getLogger(__name__)
ENGINE = "engine"
GATEWAY = "gateway"
HELD_S = 10.0
DEADLINE_S = 180.0
SLOWEST = 10 << 20
"""Bytes a second that a disk reads at least: a checkpoint is read in parts that give no sign of life meanwhile."""
LOOK_S = 1.0
GONE_S = 60.0
KEEP_LIVE = 2
MAX_ATTEMPTS = 5


@dataclass
class Sending:
    """The push under way. end: its deadline on the daemon's awake clock, later with each sign of progress; progress: the last one; pausing: the engine wants to pause; held: there once the gateway was asked,
    set when it admits nothing to the engine any more, or when nobody waits for that any more."""

    message: w.Push
    end: float
    pausing: bool = False
    progress: int = 0
    held: anyio.Event | None = None

    def done(self) -> None:
        """There is nothing to wait for."""
        if self.held is not None:
            self.held.set()


class Pusher:
    """kill(worker, reason): ends a worker's process; its death comes back through `engine_died`."""

    def __init__(self, store: Store, wire: WorkerWire, data: DataDir, kill: Callable[[str, str], None]) -> None:
        self._store = store
        self._wire = wire
        self._data = data
        self._kill = kill
        self._sending: Sending | None = None
        self._unknown: int | None = None  # spawn of an engine whose push ended badly: it gets nothing more
        self._gone_by = 0.0  # when it has ended by itself
        self._awake = Awake(store.clock.monotonic, 2 * LOOK_S)
        self.transfers = Transfers()

    async def run(self) -> None:
        """Send what is due and watch its deadline, until cancelled."""
        while True:
            changed = self._store.change()
            if self._sending is None:
                await self._send_due()
            self._watch(self._awake.now())
            with anyio.move_on_after(LOOK_S):
                await changed.wait()

    def _watch(self, now: float) -> None:
        """End an engine whose push takes too long, or that lives on when its push has failed."""
        sending = self._sending
        if sending is not None and now > sending.end:
            sending.end += sending.message.deadline_s
            self._kill(
                ENGINE, f"push {sending.message.push} to {sending.message.name} passed its deadline without progress"
            )
        if self._unknown is not None and self._unknown == self._wire.spawn(ENGINE) and now > self._gone_by:
            self._gone_by = now + GONE_S
            self._kill(ENGINE, f"its push failed, and it was to end by itself within {GONE_S:.0f} s")

    async def _send_due(self) -> None:
        spawn = self._wire.spawn(ENGINE)
        message = await self._store.write(self._claim)
        if message is None:
            return
        reach("push.claimed")
        if self._wire.spawn(ENGINE) != spawn:
            return  # it died meanwhile, and `engine_died` puts the push back: it is not the next process's
        self._sending = Sending(message, self._awake.now() + message.deadline_s + message.drain_s)
        if message.source == "live":
            self._wire.send(TRAINER, message)
        self._wire.send(ENGINE, message)

    def _claim(self, c: sqlite3.Connection) -> w.Push | None:
        run = active_run(c)
        if run is None:
            return None
        now = self._store.clock.now_ms()
        spec = stored_spec(run)
        newest = newest_checkpoint(c, run["id"])
        engine = load_worker(c, ENGINE)
        trainer = load_worker(c, TRAINER)
        busy = trainer is not None and trainer.state == "busy"
        plan = plan_push(engine, newest["id"] if newest else None, open_pushes(c, ENGINE), now)
        for push in plan.supersede:
            supersede_push(c, now, push, "prepared")
        gave_up = run["state"] == "paused" and push_failed(c, run["id"])  # until `artctl resume`
        if plan.create is not None and not gave_up:
            prepare_push(c, now, run["id"], plan.create, spec.rollout_weights_mode)
        if plan.send is None or engine is None or newest is None or engine.spawn != self._wire.spawn(ENGINE):
            return None
        if engine.spawn == self._unknown or self._wire.run(ENGINE) != run["id"]:
            return None
        fence = int(get_meta(c, "push_fence", "0")) + 1
        set_meta(c, "push_fence", str(fence))
        live = self._can_feed(c, newest, engine.spawn) and spec.rollout_weights_mode == "merged" and not busy
        transfer = None
        if trainer is not None and live:
            transfer = self.transfers.choose((TRAINER, trainer.spawn), (ENGINE, engine.spawn))
        source: Literal["live", "disk"] = "live" if transfer else "disk"
        mark_sending(c, now, plan.send, fence, source, transfer)
        name = f"{run['name']}@{newest['step']}"
        emit(c, now, run["name"], "push.sending", plan.send, step=newest["step"], source=source, transfer=transfer,
             fence=fence)  # fmt: skip
        return w.Push(
            push=plan.send,
            fence=fence,
            checkpoint=checkpoint_ref(self._data, run["name"], newest),
            mode=spec.rollout_weights_mode,
            source=source,
            name=name,
            drain_s=spec.push_drain_s,
            deadline_s=DEADLINE_S + newest["bytes"] / SLOWEST,
            rendezvous=str(self._meeting(engine.spawn, trainer.spawn, transfer)) if trainer and transfer else "",
            transfer=transfer or "gloo",
        )

    def _meeting(self, engine: int, trainer: int, transfer: w.Transfer) -> Path:
        """One for each pair of spawns and way."""
        return self._data.spawn_dir(ENGINE, engine) / f"{transfer}-{trainer}"

    def _can_feed(self, c: sqlite3.Connection, checkpoint: sqlite3.Row, engine_spawn: int) -> bool:
        """Whether the trainer's last job made this checkpoint, so that it holds it still, and this engine process has served
        before."""
        spawn = self._wire.spawn(TRAINER)
        last = c.execute("SELECT job_id, spawn FROM attempt ORDER BY job_id DESC, fence DESC LIMIT 1").fetchone()
        verified = c.execute("SELECT 1 FROM serving WHERE spawn = ? AND engine = ?", (engine_spawn, ENGINE)).fetchone()
        return tuple(last) == (checkpoint["job_id"], spawn) and verified is not None

    # ---- the hold -----------------------------------------------------------------------------------------------------

    async def pausing(self, message: w.Pausing) -> None:
        """The engine has done all that it can beside running requests: it goes on when nothing more is admitted to it."""
        sending = self._under_way(message.push, message.fence)
        if sending is None or sending.pausing:
            return  # of an older attempt, or said twice
        sending.pausing = True
        # First the row: from here on every table holds, whichever gateway gets it.
        await self._store.write(lambda c: set_meta(c, "push_held", str(message.fence)))
        if self._sending is sending:
            await self._hold(sending)
        reach("push.held")
        if self._sending is sending:  # else its engine died meanwhile
            self._wire.send(ENGINE, w.Proceed(push=message.push, fence=message.fence))

    async def _hold(self, sending: Sending) -> None:
        """Until the gateway admits nothing to the engine, or is dead; without a gateway nothing is admitted at all."""
        if self._wire.spawn(GATEWAY) is None:
            return
        message = sending.message
        held = sending.held = anyio.Event()  # only now: that an older gateway died says nothing of this one
        self._wire.send(GATEWAY, w.Hold(push=message.push, fence=message.fence, engine=ENGINE))
        awake = Awake(anyio.current_time, LOOK_S)
        while not held.is_set() and awake.now() < HELD_S:
            with anyio.move_on_after(min(LOOK_S / 2, HELD_S)):
                await held.wait()
        if not held.is_set():
            self._kill(GATEWAY, f"it did not confirm the hold of push {message.push} within {HELD_S:.0f} s")
            await held.wait()

    def held(self, message: w.Held) -> None:
        if (sending := self._under_way(message.push, message.fence)) is not None:
            sending.done()

    def gateway_died(self) -> None:
        """It admits nothing any more, and the next one's first table holds the engine: nothing is left to wait for."""
        if self._sending is not None:
            self._sending.done()

    def beat(self, message: w.Beat) -> None:
        """The engine goes on with its push: the deadline is of a standstill."""
        sending = self._under_way(message.push, message.fence)
        if sending is not None and message.progress != sending.progress:
            sending.progress = message.progress
            sending.end = self._awake.now() + sending.message.deadline_s + sending.message.drain_s

    # ---- what workers say ---------------------------------------------------------------------------------------------

    async def live(self, message: w.Live) -> None:
        reach("push.live")
        gone = await self._store.write(lambda c: self._go_live(c, message))
        if gone is None:
            return
        reach("push.served")
        self._end(message.push, message.fence)
        for name in gone:
            self._wire.send(ENGINE, w.Unload(name=name))

    def _go_live(self, c: sqlite3.Connection, message: w.Live) -> list[str] | None:
        """The served step changes here and nowhere else. Returns adapter names to unload; None when the fence is
        old."""
        row = c.execute(
            "SELECT p.*, k.step, k.abandoned, r.name AS run FROM push p JOIN checkpoint k ON k.id = p.checkpoint_id JOIN run r"
            " ON r.id = p.run_id WHERE p.id = ? AND p.fence = ? AND p.state = 'sending'",
            (message.push, message.fence),
        ).fetchone()
        spawn = self._wire.spawn(ENGINE)
        if row is None or spawn is None:
            return None
        now = self._store.clock.now_ms()
        for old in c.execute("SELECT id FROM push WHERE engine = ? AND state = 'live'", (ENGINE,)).fetchall():
            supersede_push(c, now, old["id"], "live")
        mark_live(c, message)
        name = f"{row['run']}@{row['step']}"
        gone = self._make_room(c, name, 0 if row["mode"] == "merged" else KEEP_LIVE - 1)
        insert_served(c, now, ENGINE, spawn, row, name)
        emit(c, now, row["run"], "push.live", message.push, step=row["step"], source=row["source"], transfer=row["transfer"],
             max_abs=message.max_abs, mean_abs=message.mean_abs, seconds=message.seconds)  # fmt: skip
        return gone if row["mode"] == "lora" else []

    def _make_room(self, c: sqlite3.Connection, name: str, keep: int) -> list[str]:
        """End what is served beyond the newest `keep` steps, with what a rollback left. Returns the names that the engine
        has to forget; not `name`, which has just been put in its own old place."""
        served = c.execute(
            "SELECT id, name, state FROM serving WHERE engine = ? AND state <> 'gone' ORDER BY id DESC", (ENGINE,)
        ).fetchall()
        stays = [row for row in served if row["name"] != name and row["state"] == "live"][:keep]
        gone = [row for row in served if row not in stays]
        for row in gone:
            mark_gone(c, row["id"])
        return [row["name"] for row in gone if row["name"] != name]

    async def failed(self, message: w.PushFailed) -> None:
        """The harness ends its engine after this, else `_watch` does; the push waits for the next process."""
        log.warning("push %d failed in phase %s: %s", message.push, message.phase, message.error)
        self._unknown, self._gone_by = self._wire.spawn(ENGINE), self._awake.now() + GONE_S
        await self._store.write(lambda c: self._fail(c, message))
        self._end(message.push, message.fence)

    async def refused(self, message: w.Refused) -> None:
        """The trainer does not hold the weights any more, or cannot send them: the engine restarts and loads them from
        disk. An older attempt at the same push may be refused late: that one is over."""
        if self._under_way(message.push, message.fence) is not None:
            trainer = self._wire.spawn(TRAINER)
            if message.transfer is not None and trainer is not None:
                self.transfers.refused(trainer, message.transfer)
            self._kill(ENGINE, f"the trainer refused push {message.push}: {message.reason}")

    async def trainer_died(self) -> None:
        """A live push can no longer be fed."""
        if self._sending is not None and self._sending.message.source == "live":
            self._kill(ENGINE, f"the trainer died while it fed push {self._sending.message.push}")

    async def engine_died(self, error: str, counted: bool = True) -> None:
        """Nothing of this engine is served any more; its push goes back. counted: as a failure; False at a stop."""

        def write(c: sqlite3.Connection) -> None:
            now = self._store.clock.now_ms()
            forget_engine(c, now, error, counted)

        await self._store.write(write)
        if self._sending is not None:
            self._end(self._sending.message.push, self._sending.message.fence)

    def _fail(self, c: sqlite3.Connection, message: w.PushFailed) -> None:
        """Its engine is as good as gone: the table that releases it lists nothing that it serves."""
        found = "SELECT 1 FROM push WHERE id = ? AND fence = ? AND state = 'sending'"
        if c.execute(found, (message.push, message.fence)).fetchone() is not None:
            forget_engine(c, self._store.clock.now_ms(), f"{message.phase}: {message.error}")

    def _end(self, push: int, fence: int) -> None:
        if (sending := self._under_way(push, fence)) is not None:
            if sending.message.source == "live":
                self._wire.send(TRAINER, w.PushEnd(push=push, fence=fence))
            self._sending = None
            sending.done()

    def _under_way(self, push: int, fence: int) -> Sending | None:
        """The push under way, if it is this attempt."""
        sending = self._sending
        return sending if sending and (sending.message.push, sending.message.fence) == (push, fence) else None


def forget_engine(c: sqlite3.Connection, now: int, error: str, counted: bool = True) -> None:
    """An engine process is gone: what it served and what was being pushed to it. counted: that push failed; False when
    the daemon itself went down under it."""
    for row in c.execute("SELECT * FROM push WHERE engine = ? AND state = 'sending'", (ENGINE,)).fetchall():
        put_back(c, now, row, error, counted)
    for row in c.execute("SELECT id FROM push WHERE engine = ? AND state = 'live'", (ENGINE,)).fetchall():
        supersede_push(c, now, row["id"], "live")
    for row in c.execute("SELECT id FROM serving WHERE engine = ? AND state <> 'gone'", (ENGINE,)).fetchall():
        mark_gone(c, row["id"])


def put_back(c: sqlite3.Connection, now: int, row: sqlite3.Row, error: str, counted: bool = True) -> None:
    """A push under way ended badly: `prepared` again, or `failed` and the run paused after too many failures in a row: of this
    push or of older ones, as a step that is committed meanwhile takes the place of the one that failed."""
    attempts = row["attempts"] + counted
    failures = attempts + failures_before(c, row)
    run = c.execute("SELECT id, name FROM run WHERE id = ?", (row["run_id"],)).fetchone()
    if failures < MAX_ATTEMPTS:
        retry_push(c, row["id"], attempts, error)
        emit(c, now, run["name"], "push.retried", row["id"], error=error, attempts=attempts)
        return
    fail_push(c, now, row["id"], attempts, error)
    emit(c, now, run["name"], "push.failed", row["id"], error=error)
    more = " in a row, with those of older steps" if failures > attempts else ""
    why = error.splitlines()[0] if error else "no reason given"
    pauses.hold(c, now, run["id"], f"push {row['id']}", f"push {row['id']} failed {failures} times{more}: {why}")


def failures_before(c: sqlite3.Connection, row: sqlite3.Row) -> int:
    """Failures of the run's older pushes since one was live, or since the operator resumed the run after its last failure."""
    ended = "state = 'failed' OR (state IN ('live', 'superseded') AND source IS NOT NULL AND error = '')"
    found = c.execute(
        "SELECT coalesce(sum(attempts), 0) FROM push WHERE run_id = :run AND id < :id AND id >"
        f" (SELECT coalesce(max(id), 0) FROM push WHERE run_id = :run AND id < :id AND ({ended}))",
        {"run": row["run_id"], "id": row["id"]},
    )
    return int(found.fetchone()[0])

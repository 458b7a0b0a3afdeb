"""Pushes committed checkpoints into engines: hold, update, verify, live.

Owns the rows of pushes and of what is served, and `process.held`. The step that an engine serves changes only with a
verified `Live`. An engine whose push did not end well may have any weights: it is restarted, not repaired. Each engine
has at most one push under way, and only the newest checkpoint matters. The gateway holds the engine's requests from
`Pausing` on; the engine proceeds only when the gateway admits no more requests to it.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import anyio

from artd.core.decide import WorkerView, plan_push
from artd.core.fleet import engines_of
from artd.datadir.layout import DataDir
from artd.health.awake import Awake
from artd.net.router import WorkerWire
from artd.store.store import Store, emit, get_meta, set_meta
from artd.store.views import (
    active_run,
    active_runs,
    load_worker,
    newest_checkpoint,
    open_pushes,
    push_failed,
    stored_spec,
)
from artd.tables.processes import set_held
from artd.tables.pushes import mark_live, mark_sending, prepare_push, supersede_push
from artd.tables.served import insert_served
from artd.training.dispatch import checkpoint_ref
from artd_schema.crashpoint import reach
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import GATEWAY, parse_worker, trainer_name

from .push_ends import forget_engine, make_room
from .transfers import Transfers

log = logging.getLogger(__name__)
HELD_S = 10.0
DEADLINE_S = 180.0
SLOWEST = 10 << 20
"""The slowest disk that artd allows for, in bytes per second. An engine sends no sign of progress while it reads one
part of a checkpoint."""
LAG_S = 30.0
"""Seconds without progress that an engine gets which still reads the trainer's memory when another engine of the run serves the
step already: the next job waits for it."""
LOOK_S = 1.0
GONE_S = 60.0
KEEP_LIVE = 2


@dataclass
class Sending:
    """The push under way to an engine.

    `end` is its deadline on the daemon's awake clock; each sign of progress postpones it, and `progress` is the last
    sign. `last` says that another engine of the run serves the step, so that this one holds up the trainer's next job. `pausing` says that the engine is ready to pause. `held` exists once the daemon has asked the gateway to hold.
    It is set when the gateway admits no more requests to the engine, or when nobody waits for that any more.
    """

    message: w.Push
    engine: str
    end: float
    pausing: bool = False
    last: bool = False
    progress: int = 0
    held: anyio.Event | None = None

    @property
    def patience_s(self) -> float:
        """Seconds without progress after which the engine is killed."""
        return (LAG_S if self.last else self.message.deadline_s) + self.message.drain_s

    def hurry(self, now: float) -> None:
        """Wait no longer for this engine than for one that holds up others."""
        self.last = True
        self.end = min(self.end, now + self.patience_s)

    def wake(self) -> None:
        """Wake whoever waits for the hold."""
        if self.held is not None:
            self.held.set()


@dataclass
class Unknown:
    """A process of an engine whose push ended badly, so that its weights are unknown. It gets no further push, and has
    to end by itself until `gone_by`."""

    spawn: int | None
    gone_by: float


class Pusher:
    """Pushes to every engine. `kill(worker, reason)` ends a worker's process; the engine's death then arrives through
    `engine_died`."""

    def __init__(self, store: Store, wire: WorkerWire, data: DataDir, kill: Callable[[str, str], None]) -> None:
        self._store = store
        self._wire = wire
        self._data = data
        self._kill = kill
        self._sending: dict[str, Sending] = {}  # by engine
        self._unknown: dict[str, Unknown] = {}  # by engine
        self._awake = Awake(store.clock.monotonic, 2 * LOOK_S)
        self.transfers = Transfers()

    async def run(self) -> None:
        """Send each push when it is due, and watch its deadline, until cancelled."""
        while True:
            changed = self._store.change()
            for engine in await self._store.write(_engines):
                if engine not in self._sending:
                    await self._send_due(engine)
            self._watch(self._awake.now())
            with anyio.move_on_after(LOOK_S):
                await changed.wait()

    def _watch(self, now: float) -> None:
        """Kill engines whose push passed its deadline, and engines that did not end by themselves after a failed push."""
        for engine, sending in self._sending.items():
            if now > sending.end:
                sending.end = now + sending.patience_s
                what = f"push {sending.message.push} to {sending.message.name}"
                self._kill(engine, f"{what} passed its deadline without progress")
        for engine, unknown in self._unknown.items():
            if unknown.spawn is not None and unknown.spawn == self._wire.spawn(engine) and now > unknown.gone_by:
                unknown.gone_by = now + GONE_S
                self._kill(engine, f"its push failed, and it was to end by itself within {GONE_S:.0f} s")

    async def _send_due(self, engine: str) -> None:
        """Send the engine's next push, if one is due."""
        spawn = self._wire.spawn(engine)
        message = await self._store.write(lambda c: self._claim(c, engine))
        if message is None:
            return
        reach("push.claimed")
        if self._wire.spawn(engine) != spawn:
            return  # the engine died meanwhile: `engine_died` puts the push back, and the next process must not get it
        self._sending[engine] = Sending(message, engine, self._awake.now() + message.deadline_s + message.drain_s)
        if message.source == "live":
            self._wire.send(_trainer_for(engine), message)
        self._wire.send(engine, message)

    def _claim(self, c: sqlite3.Connection, name: str) -> w.Push | None:
        """Claim the next push of the engine `name`. Returns the message to send, None when nothing is due."""
        run = active_run(c, parse_worker(name).run)
        if run is None:
            return None
        now = self._store.clock.now_ms()
        spec = stored_spec(run)
        newest = newest_checkpoint(c, run["id"])
        engine = load_worker(c, name)
        trainer = load_worker(c, _trainer_for(name))
        busy = trainer is not None and trainer.state == "busy"
        plan = plan_push(engine, newest["id"] if newest else None, open_pushes(c, name), now)
        for push in plan.supersede:
            supersede_push(c, now, push, "prepared")
        gave_up = run["state"] == "paused" and push_failed(c, run["id"], name)  # until `artctl resume`
        if plan.create is not None and not gave_up:
            prepare_push(c, now, run["id"], name, plan.create, spec.rollout_weights_mode)
        if plan.send is None or engine is None or newest is None or engine.spawn != self._wire.spawn(name):
            return None
        if (unknown := self._unknown.get(name)) is not None and unknown.spawn == engine.spawn:
            return None
        fence = int(get_meta(c, "push_fence", "0")) + 1
        set_meta(c, "push_fence", str(fence))
        live = self._can_feed(c, newest, engine) and spec.rollout_weights_mode == "merged" and not busy
        transfer = None
        if trainer is not None and live:
            transfer = self.transfers.choose((trainer.name, trainer.spawn), (name, engine.spawn))
        source: Literal["live", "disk"] = "live" if transfer else "disk"
        mark_sending(c, now, plan.send, fence, source, transfer)
        emit(c, now, run["name"], "push.sending", plan.send, step=newest["step"], source=source, transfer=transfer,
             fence=fence, engine=name)  # fmt: skip
        return w.Push(
            push=plan.send,
            fence=fence,
            checkpoint=checkpoint_ref(self._data, run["name"], newest),
            mode=spec.rollout_weights_mode,
            source=source,
            name=f"{run['name']}@{newest['step']}",
            drain_s=spec.push_drain_s,
            deadline_s=DEADLINE_S + newest["bytes"] / SLOWEST,
            rendezvous=str(self._meeting(engine, trainer.spawn, transfer)) if trainer and transfer else "",
            transfer=transfer or "gloo",
            engine=name,
        )

    def _meeting(self, engine: WorkerView, trainer: int, transfer: w.Transfer) -> Path:
        """Return the path at which a spawn of the trainer and one of the engine meet for this transfer."""
        return self._data.spawn_dir(engine.name, engine.spawn) / f"{transfer}-{trainer}"

    def _can_feed(self, c: sqlite3.Connection, checkpoint: sqlite3.Row, engine: WorkerView) -> bool:
        """Return whether the trainer can feed this push from its memory: its last job made this checkpoint, so its
        weights are still there, and this process of the engine has already served something."""
        trainer = _trainer_for(engine.name)
        last = c.execute(
            "SELECT job_id, spawn FROM attempt WHERE worker = ? ORDER BY job_id DESC, fence DESC LIMIT 1", (trainer,)
        ).fetchone()
        served = "SELECT 1 FROM serving WHERE spawn = ? AND engine = ? LIMIT 1"
        verified = c.execute(served, (engine.spawn, engine.name)).fetchone()
        mine = last is not None and tuple(last) == (checkpoint["job_id"], self._wire.spawn(trainer))
        return mine and verified is not None

    # ---- the hold -----------------------------------------------------------------------------------------------------

    async def pausing(self, message: w.Pausing) -> None:
        """Hold the gateway's requests to an engine, then let the engine proceed. The engine has done everything that it
        can do while requests run."""
        sending = self._under_way(message.push, message.fence)
        if sending is None or sending.pausing:
            return  # the message is from an older attempt, or it is a repetition
        sending.pausing = True
        # The row comes first: from now on every routing table holds this engine, whichever gateway process gets the table.
        await self._store.write(lambda c: set_held(c, sending.engine, message.fence))
        if self._sending.get(sending.engine) is sending:
            await self._hold(sending)
        reach("push.held")
        if self._sending.get(sending.engine) is sending:  # otherwise the engine died meanwhile
            self._wire.send(sending.engine, w.Proceed(push=message.push, fence=message.fence))

    async def _hold(self, sending: Sending) -> None:
        """Wait until the gateway admits no more requests to the engine, or is dead. Without a gateway nothing is
        admitted at all."""
        if self._wire.spawn(GATEWAY) is None:
            return
        message = sending.message
        held = sending.held = anyio.Event()  # not earlier, or the death of an older gateway would count for this one
        self._wire.send(GATEWAY, w.Hold(push=message.push, fence=message.fence, engine=sending.engine))
        awake = Awake(anyio.current_time, LOOK_S)
        while not held.is_set() and awake.now() < HELD_S:
            with anyio.move_on_after(min(LOOK_S / 2, HELD_S)):
                await held.wait()
        if not held.is_set():
            self._kill(GATEWAY, f"it did not confirm the hold of push {message.push} within {HELD_S:.0f} s")
            await held.wait()

    def take_held(self, message: w.Held) -> None:
        if (sending := self._under_way(message.push, message.fence)) is not None:
            sending.wake()

    def gateway_died(self) -> None:
        """End every wait for a hold: a dead gateway admits nothing, and the first routing table of the next one holds
        the engines."""
        for sending in self._sending.values():
            sending.wake()

    def beat(self, message: w.Beat) -> None:
        """Postpone a push's deadline if its engine made progress: the deadline limits a standstill, not the whole push."""
        sending = self._under_way(message.push, message.fence)
        if sending is not None and message.progress != sending.progress:
            sending.progress = message.progress
            sending.end = self._awake.now() + sending.patience_s

    # ---- messages of workers ------------------------------------------------------------------------------------------

    async def live(self, message: w.Live) -> None:
        reach("push.live")
        done = await self._store.write(lambda c: self._go_live(c, message))
        if done is None:
            return
        reach("push.served")
        if (sending := self._under_way(message.push, message.fence)) is not None:
            self._hurry_others(sending)
        self._end(message.push, message.fence)
        engine, gone = done
        for name in gone:
            self._wire.send(engine, w.Unload(name=name))

    def _hurry_others(self, first: Sending) -> None:
        """Wait for what the trainer still sends to other engines only as long as it goes on: meanwhile its weights may not change."""
        for sending in self._sending.values():
            message = sending.message
            if message.source == "live" and message.checkpoint == first.message.checkpoint and sending is not first:
                sending.hurry(self._awake.now())

    def _go_live(self, c: sqlite3.Connection, message: w.Live) -> tuple[str, list[str]] | None:
        """Change the step that an engine serves; only this function does. Returns the engine and the adapters that it
        must unload, or None if the message's fence is old."""
        row = c.execute(
            "SELECT p.*, k.step, k.abandoned, r.name AS run FROM push p JOIN checkpoint k ON k.id = p.checkpoint_id JOIN run r"
            " ON r.id = p.run_id WHERE p.id = ? AND p.fence = ? AND p.state = 'sending'",
            (message.push, message.fence),
        ).fetchone()
        engine = row["engine"] if row is not None else ""
        spawn = self._wire.spawn(engine)
        if row is None or spawn is None:
            return None
        now = self._store.clock.now_ms()
        for old in c.execute("SELECT id FROM push WHERE engine = ? AND state = 'live'", (engine,)).fetchall():
            supersede_push(c, now, old["id"], "live")
        mark_live(c, message)
        name = f"{row['run']}@{row['step']}"
        gone = make_room(c, engine, name, 0 if row["mode"] == "merged" else KEEP_LIVE - 1)
        insert_served(c, now, engine, spawn, row, name)
        emit(c, now, row["run"], "push.live", message.push, step=row["step"], source=row["source"], transfer=row["transfer"],
             max_abs=message.max_abs, mean_abs=message.mean_abs, seconds=message.seconds, engine=engine)  # fmt: skip
        return engine, gone if row["mode"] == "lora" else []

    async def take_failed(self, message: w.PushFailed) -> None:
        """Take back a failed push: it waits for the engine's next process. The harness ends its engine by itself; if it
        does not, `_watch` kills it."""
        log.warning("push %d failed in phase %s: %s", message.push, message.phase, message.error)
        for row in await self._store.read("SELECT engine FROM push WHERE id = ?", (message.push,)):
            engine = row["engine"]
            self._unknown[engine] = Unknown(self._wire.spawn(engine), self._awake.now() + GONE_S)
        await self._store.write(lambda c: self._fail(c, message))
        self._end(message.push, message.fence)

    async def take_refused(self, message: w.Refused) -> None:
        """Restart an engine if the trainer cannot send it the weights, or no longer holds them: the engine then loads
        them from disk. A late refusal of an older attempt changes nothing."""
        if (sending := self._under_way(message.push, message.fence)) is not None:
            trainer = _trainer_for(sending.engine)
            spawn = self._wire.spawn(trainer)
            if message.transfer is not None and spawn is not None:
                self.transfers.rule_out((trainer, spawn), sending.engine, message.transfer)
            self._kill(sending.engine, f"the trainer refused push {message.push}: {message.reason}")

    async def trainer_died(self, trainer: str) -> None:
        """Restart the engines that this trainer was feeding."""
        self.transfers.forget(trainer)
        for engine, sending in self._sending.items():
            if sending.message.source == "live" and _trainer_for(engine) == trainer:
                self._kill(engine, f"the trainer died while it fed push {sending.message.push}")

    async def engine_died(self, engine: str, error: str, counted: bool = True) -> None:
        """Forget what a dead engine served and put its push back. `counted` says whether that counts as a failure of
        the push; it does not at a stop of the daemon."""

        def write(c: sqlite3.Connection) -> None:
            now = self._store.clock.now_ms()
            forget_engine(c, now, engine, error, counted)

        await self._store.write(write)
        if (sending := self._sending.get(engine)) is not None:
            self._end(sending.message.push, sending.message.fence)

    def _fail(self, c: sqlite3.Connection, message: w.PushFailed) -> None:
        """Forget what the engine of a failed push served, because it will end: the next routing table releases its hold
        and lists nothing for it."""
        found = "SELECT engine FROM push WHERE id = ? AND fence = ? AND state = 'sending'"
        if (row := c.execute(found, (message.push, message.fence)).fetchone()) is not None:
            forget_engine(c, self._store.clock.now_ms(), row["engine"], f"{message.phase}: {message.error}")

    def _end(self, push: int, fence: int) -> None:
        if (sending := self._under_way(push, fence)) is not None:
            if sending.message.source == "live":
                self._wire.send(_trainer_for(sending.engine), w.PushEnd(push=push, fence=fence))
            del self._sending[sending.engine]
            sending.wake()

    def _under_way(self, push: int, fence: int) -> Sending | None:
        """Return the push under way that is this attempt, None if there is none."""
        attempts = ((sending.message.push, sending.message.fence, sending) for sending in self._sending.values())
        return next((sending for *attempt, sending in attempts if attempt == [push, fence]), None)


def _trainer_for(engine: str) -> str:
    """Return the trainer that feeds an engine: the trainer of the same run."""
    return trainer_name(parse_worker(engine).run)


def _engines(c: sqlite3.Connection) -> list[str]:
    return [engine for run in active_runs(c) for engine in engines_of(run["id"], stored_spec(run))]

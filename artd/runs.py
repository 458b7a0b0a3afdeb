"""Runs: created, attached to, paused, resumed, finished; and what a client waits for.

Owner of: the run table. Invariants: a spec never changes; one run is active (or paused) at a time; creating a run
queues its init job in the same transaction, and finishing it gives up what it has not done.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable

import anyio
import anyio.to_thread
import msgspec

from artd_schema import client_api as api
from artd_schema.codec import to_json
from artd_schema.crashpoint import reach
from artd_schema.families import SEEDED
from artd_schema.spec import MAX_SERVED_RANK, RunSpec, first_difference, in_flight_error, layout_error

from .base_model import BaseModel, pin
from .core.decide import RunView, is_stalled
from .errors import Conflict, Invalid, NotFound, RequestError
from .jobs import give_up
from .store.store import Store, emit, get_meta, move
from .supervise.postmortem import telling
from .views import load_run, push_failed

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Runs:
    """What clients ask about runs. require_runtimes: raises Conflict when trainer or engine cannot run here; routed: names
    (`RUN@STEP`) that the gateway confirmed to route."""

    def __init__(
        self, store: Store, require_runtimes: Callable[[], None], routed: Callable[[], frozenset[str]]
    ) -> None:
        self._routed = routed
        self._store = store
        self._require_runtimes = require_runtimes

    async def create(self, op: api.CreateRun) -> api.RunInfo:
        """Create a run or attach to it. Errors: Invalid, NotFound, Conflict."""
        known = await self._store.read("SELECT spec FROM run WHERE name = ?", (op.name,))
        if known:
            _check_same(op.name, msgspec.json.decode(known[0]["spec"], type=RunSpec), op.spec)
            return await self.info(op.name, created=False)
        if op.spec is None:
            raise NotFound(f"there is no run {op.name!r}; give a model to create it", field="name")
        if not NAME.fullmatch(op.name):
            raise Invalid(
                f"run name {op.name!r}: 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
                field="name",
            )
        _check_spec(op.spec)
        self._require_runtimes()
        base = await anyio.to_thread.run_sync(pin, op.spec.model)
        _check_base(op.spec, base)
        spec = op.spec
        created = await self._store.write(lambda c: _insert(c, self._store.clock.now_ms(), op.name, spec, base))
        reach("run.created")
        return await self.info(op.name, created)

    async def info(self, name: str, created: bool) -> api.RunInfo:
        def read(c: sqlite3.Connection) -> api.RunInfo:
            run = c.execute("SELECT * FROM run WHERE name = ?", (name,)).fetchone()
            if run is None:
                raise NotFound(f"there is no run {name!r}", field="run")
            return api.RunInfo(
                name=name,
                state=run["state"],
                reason=run["reason"],
                spec=msgspec.json.decode(run["spec"], type=RunSpec),
                step=run["step"],
                served=served_step(c, run["id"]),
                created=created,
                base_url=get_meta(c, "gateway_url") + "/v1",
                api_key=get_meta(c, "gateway_token"),
                lineage=run["lineage"],
            )

        return await self._store.write(read)

    async def set_state(self, name: str, target: str, reason: str = "") -> api.Done:
        """pause, resume, finish. Asking for the state that a run has is no error."""

        def write(c: sqlite3.Connection) -> api.Done:
            row = c.execute("SELECT id, state FROM run WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise NotFound(f"there is no run {name!r}; `artctl runs` lists them", field="run")
            if row["state"] == target:
                return api.Done()
            if row["state"] == "finished":
                raise Conflict(f"run {name!r} is finished; create another", field="run")
            now = self._store.clock.now_ms()
            set_run_state(c, now, row["id"], target, reason)
            if target == "finished":
                give_up(c, now, row["id"], name)
            return api.Done()

        return await self._store.write(write)

    async def wait(self, op: api.WaitStep) -> api.Answer:
        """StepInfo when the step is committed and served, Stalled when it cannot come by itself, Pending at the
        time-out."""
        end = self._store.clock.monotonic() + min(op.timeout_s, 60.0)
        while True:
            changed = self._store.change()
            routed = self._routed()
            answer = await self._store.write(lambda c: _progress(c, op, routed))  # noqa: B023 - awaited here
            left = end - self._store.clock.monotonic()
            if not isinstance(answer, api.Pending) or left <= 0:
                return answer
            with anyio.move_on_after(left):
                await changed.wait()


def _check_spec(spec: RunSpec) -> None:
    """Errors: Invalid for fields that exclude each other, or with which nothing could ever be trained."""
    if spec.group_size < 2:
        raise Invalid(
            "group_size=1 trains nothing: a reward counts by how it differs from the others of its group, so a group of one"
            " is discarded; use 2 or more answers to each prompt",
            field="spec.group_size",
        )
    if spec.parameters == "full" and spec.rollout_weights_mode == "lora":
        raise Invalid(
            "parameters='full' trains every weight, and there is no adapter to serve: use rollout_weights_mode='merged'",
            field="spec.rollout_weights_mode",
        )
    if spec.rollout_weights_mode == "lora" and spec.lora.rank > MAX_SERVED_RANK:
        raise Invalid(
            f"an engine serves adapters of rank {MAX_SERVED_RANK} at most: use a lower one, or rollout_weights_mode='merged'",
            field="spec.lora.rank",
        )
    if error := layout_error(spec):
        raise Invalid(error, field="spec.trainer")
    if error := in_flight_error(spec):
        raise Invalid(error, field="spec.engine.in_flight")


def _check_base(spec: RunSpec, base: BaseModel) -> None:
    """Errors: Invalid for a base model that the run's engine cannot start from."""
    if spec.rollout_weights_mode == "lora" and any(file.name == SEEDED for file in base.files):
        raise Invalid(
            f"the weights of {spec.model} are drawn, and an engine that serves adapters reads its base from disk: use "
            "rollout_weights_mode='merged'",
            field="spec.rollout_weights_mode",
        )


def _check_same(name: str, stored: RunSpec, asked: RunSpec | None) -> None:
    if asked is not None and (field := first_difference(stored, asked)):
        raise Conflict(
            f"run {name!r} exists with another spec: `{field}` differs; use another name, or that value", field=field
        )


def _insert(c: sqlite3.Connection, now: int, name: str, spec: RunSpec, base: BaseModel) -> bool:
    """Whether the run is new; False when another client made the same one meanwhile."""
    known = c.execute("SELECT spec FROM run WHERE name = ?", (name,)).fetchone()
    if known is not None:
        _check_same(name, msgspec.json.decode(known["spec"], type=RunSpec), spec)
        return False
    other = c.execute("SELECT name FROM run WHERE state <> 'finished'").fetchone()
    if other is not None:
        raise Conflict(
            f"run {other['name']!r} is active, and artd trains one at a time: `artctl finish {other['name']}` ends it",
            field="name",
        )
    routes = to_json(base.routes) if base.routes and spec.expert_replay else b""
    cursor = c.execute(
        "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, routes, state, next_epoch, created)"
        " VALUES (?, ?, ?, ?, ?, ?, 'active', 1, ?)",
        (name, to_json(spec), base.digest, to_json(base), base.vocab_size, routes, now),
    )
    c.execute(
        "INSERT INTO job (run_id, kind, step, epoch, state, created) VALUES (?, 'init', 0, 0, 'queued', ?)",
        (cursor.lastrowid, now),
    )
    emit(c, now, name, "run.created", name, model=spec.model, mode=spec.rollout_weights_mode)
    return True


def set_run_state(c: sqlite3.Connection, now: int, run_id: int, target: str, reason: str) -> None:
    """Move a run and tell of it."""
    name = c.execute("SELECT name FROM run WHERE id = ?", (run_id,)).fetchone()["name"]
    move(c, "run", run_id, target, reason=reason if target == "paused" else "")
    verb = {"active": "resumed", "paused": "paused", "finished": "finished"}[target]
    emit(c, now, name, f"run.{verb}", name, reason=reason)


def served_step(c: sqlite3.Connection, run_id: int) -> int:
    """Newest live step of a run, -1 when none is served."""
    row = c.execute(
        "SELECT max(k.step) AS step FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " WHERE s.run_id = ? AND s.state = 'live'",
        (run_id,),
    ).fetchone()
    return -1 if row["step"] is None else int(row["step"])


def _is_routed(c: sqlite3.Connection, run_id: int, name: str, routed: frozenset[str]) -> bool:
    """Whether the gateway answers with this step, and with none any more that a rollback left."""
    left = c.execute("SELECT name FROM serving WHERE run_id = ? AND state = 'draining'", (run_id,))
    return name in routed and not any(row["name"] in routed for row in left)


def _progress(c: sqlite3.Connection, op: api.WaitStep, routed: frozenset[str]) -> api.Answer:
    row = c.execute("SELECT id, reason FROM run WHERE name = ?", (op.run,)).fetchone()
    if row is None:
        raise NotFound(f"there is no run {op.run!r}", field="run")
    run = load_run(c, row["id"])
    served = served_step(c, row["id"])
    there = served > op.step or (served == op.step and _is_routed(c, row["id"], f"{op.run}@{op.step}", routed))
    if run.step >= op.step and there:
        return _step_info(c, row["id"], op)
    if hopeless := _hopeless(c, row["id"], run, op.step):
        what = f": {row['reason']}" if row["reason"] else ""
        raise RequestError(
            f"run {op.run!r} is {run.state}{what}; step {op.step} will not {hopeless}. Next: artctl status"
        )
    if is_stalled(run, op.step):
        return api.Stalled(step=run.step, sealed=len(run.sealed), trainable=len(run.sealed), needed=run.groups_per_step)
    phase = run.job or ("serve" if run.step >= op.step else "collect")
    return api.Pending(step=run.step, phase=phase, problem=_broken(c))


def _broken(c: sqlite3.Connection) -> str:
    """The worker that nothing starts any more, and why."""
    row = c.execute("SELECT name, error FROM process WHERE state = 'broken' ORDER BY name").fetchone()
    return f"{row['name']} is broken: {telling(row['error'])}" if row else ""


def _hopeless(c: sqlite3.Connection, run_id: int, run: RunView, step: int) -> str:
    """What will not become of a step as long as the run is in its state; "" when it may be served still."""
    if run.state == "active":
        return ""
    if run.step < step:
        return "come"
    return "be served" if run.state == "finished" or push_failed(c, run_id) else ""


def _step_info(c: sqlite3.Connection, run_id: int, op: api.WaitStep) -> api.StepInfo:
    row = c.execute(
        "SELECT k.sha, j.metrics, j.seconds FROM checkpoint k JOIN job j ON j.id = k.job_id WHERE k.run_id = ? AND k.step = ?"
        " AND k.abandoned = 0",
        (run_id, op.step),
    ).fetchone()
    return api.StepInfo(
        run=op.run,
        step=op.step,
        checkpoint=row["sha"],
        metrics=msgspec.json.decode(row["metrics"]),
        seconds=msgspec.json.decode(row["seconds"]),
    )

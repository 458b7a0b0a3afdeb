"""Creates, attaches to, pauses, resumes and finishes runs, and answers clients that wait for a step.

A run's spec never changes. Creating a run queues its init job in the same transaction; finishing it cancels its
unfinished work.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec

from artd.core.decide import RunView, is_stalled
from artd.core.fleet import Unfinished, admission_error, engines_of
from artd.errors import Conflict, Invalid, NotFound, RequestError
from artd.models import names
from artd.models.base_model import check_family, pin, read_config
from artd.models.fetcher import Fetched, Fetcher
from artd.packing import failures
from artd.rollouts import slices
from artd.store.selects import NOT_DELETED, UNFINISHED
from artd.store.store import Store, emit, get_meta
from artd.store.views import learning_of, load_run, push_failed, stored_spec, unreadable
from artd.supervise.packages import NO_PACKAGES, Packages
from artd.supervise.postmortem import telling
from artd.tables import pauses
from artd.tables.jobs import give_up, insert_init_job
from artd.tables.once import first_time
from artd.tables.runs import insert_run
from artd_schema.codec import UNREADABLE, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.base import BaseModel
from artd_schema.run.engines import UnknownEngine, engine_kind
from artd_schema.run.families import SEEDED
from artd_schema.run.losses import EXAMPLES
from artd_schema.run.spec import RunSpec, first_difference, in_flight_error, layout_error, length_error
from artd_schema.wire import client_api as api
from artd_schema.wire.worker_names import label

from .learning import check_loss, check_rules, update_learning
from .waits import Waits

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
WORKERS = """
SELECT kind, replica, error, since FROM process WHERE (run_id = :run OR run_id IS NULL)"""
"""The workers that a run needs: its own, and the gateway."""
TOLD = 16
"""`Stalled` explains at most this many of the newest discarded groups."""


class Runs:
    """Answers the requests of clients about runs. `require_runtimes` raises RequestError when the trainer, or an engine
    of this kind, cannot run here. `routed` returns the names (`RUN@STEP`) that the gateway confirmed to route.
    `packages` says what installed packages offer."""

    def __init__(
        self, store: Store, require_runtimes: Callable[[str], None], routed: Callable[[], frozenset[str]],
        models: Fetcher | None = None, packages: Packages = NO_PACKAGES,
    ) -> None:  # fmt: skip
        self._packages = packages
        self._models = models or Fetcher()
        self._store = store
        self._require_runtimes = require_runtimes
        self._waits = Waits(store, lambda c, run, step: _progress(c, run, step, routed(), store.clock.now_ms()))

    async def create(self, op: api.CreateRun) -> api.RunInfo | api.Pending:
        """Create a run or attach to it. Returns Pending while its model is being fetched. Raises Invalid, NotFound,
        Conflict."""
        known = await self._store.read(f"SELECT name, spec FROM run WHERE name = ? AND {NOT_DELETED}", (op.name,))
        if known:
            if op.spec is not None:
                _check_same(op.name, stored_spec(known[0]), op.spec)
            return await self.info(op.name, created=False)
        if op.spec is None:
            raise NotFound(f"there is no run {op.name!r}; give a model to create it", field="name")
        if not NAME.fullmatch(op.name):
            raise Invalid(
                f"run name {op.name!r}: 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit",
                field="name",
            )
        _check_spec(op.spec)
        check_loss(op.spec.loss, self._packages.losses)
        model = await self._model(op.spec)
        if isinstance(model, str):
            return api.Pending(step=-1, phase="fetch", doing=model)
        spec, base = msgspec.structs.replace(op.spec, model=model.path), model.base
        _check_base(spec, base)
        created = await self._store.write(lambda c: _insert(c, self._store.clock.now_ms(), op.name, spec, base))
        reach("run.created")
        return await self.info(op.name, created)

    async def _model(self, spec: RunSpec) -> Fetched | str:
        """Return the model's folder and manifest, or what is being done to fetch it. Raises Invalid, Conflict."""
        model = spec.model
        if names.parse(model):
            self._require_runtimes(spec.engine.kind)
            found = await self._models.get(model)
            if isinstance(found, Fetched):
                check_family(found.path, found.base.architecture, self._packages.families)
            return found
        config = await anyio.to_thread.run_sync(read_config, Path(model))
        check_family(model, config.architecture, self._packages.families)
        self._require_runtimes(spec.engine.kind)
        return Fetched(model, await anyio.to_thread.run_sync(pin, model))

    async def info(self, name: str, created: bool) -> api.RunInfo:
        def read(c: sqlite3.Connection) -> api.RunInfo:
            run = c.execute("SELECT * FROM run WHERE name = ?", (name,)).fetchone()
            if run is None:
                raise NotFound(f"there is no run {name!r}", field="run")
            return api.RunInfo(
                name=name,
                state=run["state"],
                reason=run["reason"],
                spec=None if unreadable(run) else stored_spec(run),
                step=run["step"],
                served=served_step(c, run["id"]),
                created=created,
                base_url=get_meta(c, "gateway_url") + "/v1",
                api_key=get_meta(c, "gateway_token"),
                lineage=run["lineage"],
                learning=None if unreadable(run) else learning_of(run),
            )

        return await self._store.ask(read)

    async def set_state(self, name: str, target: str, reason: str = "", request: str = "") -> api.Done:
        """Pause, resume or finish a run; its present state is not an error. A repeated request of the same id `request`
        changes nothing. Raises NotFound, Conflict, Unreadable."""

        def write(c: sqlite3.Connection) -> api.Done:
            row = c.execute("SELECT id, name, spec, state FROM run WHERE name = ?", (name,)).fetchone()
            if row is None:
                raise NotFound(f"there is no run {name!r}; `artctl runs` lists them", field="run")
            if row["state"] == "finished" == target:
                return api.Done()
            if row["state"] == "finished":
                raise Conflict(f"run {name!r} is finished; create another", field="run")
            if target == "active":
                stored_spec(row)
            now = self._store.clock.now_ms()
            if not first_time(c, now, request):
                return api.Done()
            set_run_state(c, now, row["id"], target, reason)
            if target == "finished":
                give_up(c, now, row["id"], name)
            return api.Done()

        done = await self._store.write(write)
        while target == "finished" and await self._store.write(lambda c: self._discard_waiting(c, name)):
            pass
        return done

    def _discard_waiting(self, c: sqlite3.Connection, name: str) -> bool:
        row = c.execute("SELECT id FROM run WHERE name = ?", (name,)).fetchone()
        return row is not None and slices.discard_waiting(c, self._store.clock.now_ms(), row["id"])

    async def update(self, op: api.UpdateRun) -> api.Done:
        """Change what a run learns with; its next batch has it. Raises NotFound, Conflict, Invalid, Unreadable."""
        await self._store.write(lambda c: update_learning(c, self._store.clock.now_ms(), op, self._packages.losses))
        return api.Done()

    async def wait(self, op: api.WaitStep) -> api.Answer:
        """Return StepInfo of a committed and served step, Stalled if the step needs more submissions, Pending at the
        time-out."""
        return await self._waits.wait(op)


def _check_spec(spec: RunSpec) -> None:
    """Raise Invalid if fields exclude each other, or if nothing could ever be trained with them."""
    if spec.parameters == "full" and spec.rollout_weights_mode == "lora":
        raise Invalid(
            "parameters='full' trains every weight, and there is no adapter to serve: use rollout_weights_mode='merged'",
            field="spec.rollout_weights_mode",
        )
    try:
        engine = engine_kind(spec.engine.kind)
    except UnknownEngine as unknown:
        raise Invalid(str(unknown), field="spec.engine.kind") from None
    for field in ("tool_parser", "reasoning_parser"):
        if refused := engine.parser_refusal(field, getattr(spec.engine, field)):
            raise Invalid(refused, field=f"spec.engine.{field}")
    for name, value in spec.engine.args.items():
        if refused := engine.arg_refusal(name, value):
            raise Invalid(refused, field="spec.engine.args")
    if spec.rollout_weights_mode == "lora" and spec.lora.rank > engine.adapter_rank:
        raise Invalid(
            f"an engine serves adapters of rank {engine.adapter_rank} at most: use a lower one, or rollout_weights_mode='merged'",
            field="spec.lora.rank",
        )
    if error := length_error(spec):
        raise Invalid(error, field="spec.row_length")
    if error := layout_error(spec):
        raise Invalid(error, field="spec.trainer")
    if error := in_flight_error(spec):
        raise Invalid(error, field="spec.engine.in_flight")
    check_rules(spec)


def _check_base(spec: RunSpec, base: BaseModel) -> None:
    """Raise Invalid if the run's engine cannot start from the base model, or if the spec asks for experts that the
    model does not have."""
    if spec.trainer.recompute == "selective" and base.routes is None:
        raise Invalid(
            f"trainer.recompute='selective' computes experts again in the backward, and {spec.model} has none: use 'full', or 'none'",
            field="spec.trainer.recompute",
        )
    if spec.loss.kind == EXAMPLES and spec.expert_replay and base.routes is not None:
        raise Invalid(
            f"expert_replay trains through the experts that an engine chose, and examples have none: {spec.model} needs expert_replay=False "
            "with loss.kind='sft'",
            field="spec.expert_replay",
        )
    if spec.rollout_weights_mode == "lora" and any(file.name == SEEDED for file in base.files):
        raise Invalid(
            f"the weights of {spec.model} are drawn, and an engine that serves adapters reads its base from disk: use "
            "rollout_weights_mode='merged'",
            field="spec.rollout_weights_mode",
        )


def _check_same(name: str, stored: RunSpec, asked: RunSpec) -> None:
    if (model := names.parse(asked.model)) and names.is_of(stored.model, model):
        asked = msgspec.structs.replace(asked, model=stored.model)
    if field := first_difference(stored, asked):
        raise Conflict(
            f"run {name!r} exists with another spec: `{field}` differs; use another name, or that value", field=field
        )


def _insert(c: sqlite3.Connection, now: int, name: str, spec: RunSpec, base: BaseModel) -> bool:
    """Insert the run. Returns False when another client created the same run meanwhile."""
    known = c.execute("SELECT name, spec FROM run WHERE name = ?", (name,)).fetchone()
    if known is not None:
        _check_same(name, stored_spec(known), spec)
        return False
    others = c.execute(f"SELECT name, state, step FROM run WHERE {UNFINISHED} ORDER BY id")
    if error := admission_error([Unfinished(*row) for row in others]):
        raise Conflict(error, field="name")
    stored = _encode_spec(spec)
    routes = to_json(base.routes) if base.routes and spec.expert_replay else b""
    insert_init_job(c, now, insert_run(c, now, name, stored, base, routes))
    emit(c, now, name, "run.created", name, model=spec.model, mode=spec.rollout_weights_mode)
    return True


def _encode_spec(spec: RunSpec) -> bytes:
    """Return the spec as its row stores it. Raises Invalid if the row would be read back as another spec, or not at
    all."""
    stored = to_json(spec)
    try:
        same = msgspec.json.decode(stored, type=RunSpec) == spec
    except UNREADABLE as error:
        raise Invalid(f"the spec cannot be stored: {error}", field="spec") from None
    if not same:
        raise Invalid("the spec cannot be stored: it would be read back as another one", field="spec")
    return stored


def pause_unreadable(c: sqlite3.Connection, now: int) -> list[str]:
    """Pause every run whose spec cannot be read, and release it once its spec can be read again. No service does
    anything for a paused run, and all other runs go on. Returns what is wrong with each spec."""
    told = []
    for row in c.execute(f"SELECT id, name, spec FROM run WHERE {UNFINISHED}").fetchall():
        if why := unreadable(row):
            pauses.hold(c, now, row["id"], pauses.SPEC, why)
            told.append(why)
        else:
            pauses.lift(c, now, row["id"], pauses.SPEC)
    return told


def set_run_state(c: sqlite3.Connection, now: int, run_id: int, target: str, reason: str) -> None:
    """Apply an operator's order: pause (adds one cause), resume (lifts every cause) or finish."""
    if target == "paused":
        pauses.hold(c, now, run_id, pauses.OPERATOR, reason)
    elif target == "active":
        pauses.lift(c, now, run_id)
    else:
        pauses.finish(c, now, run_id)


def served_step(c: sqlite3.Connection, run_id: int) -> int:
    """Return the newest live step of a run, -1 when none is served."""
    row = c.execute(
        "SELECT max(k.step) AS step FROM serving s JOIN checkpoint k ON k.id = s.checkpoint_id"
        " WHERE s.run_id = ? AND s.state = 'live'",
        (run_id,),
    ).fetchone()
    return -1 if row["step"] is None else int(row["step"])


def _count_discarded(c: sqlite3.Connection, run_id: int) -> dict[str, int]:
    """Return why the newest groups of a run were discarded, with the number of groups for each reason."""
    rows = c.execute(
        "SELECT reason, count(*) AS groups FROM (SELECT reason FROM trajectory_group WHERE run_id = ? AND state = 'discarded'"
        " ORDER BY id DESC LIMIT ?) GROUP BY reason ORDER BY groups DESC, reason",
        (run_id, TOLD),
    )
    return {row["reason"]: row["groups"] for row in rows}


def _is_routed(c: sqlite3.Connection, run_id: int, name: str, routed: frozenset[str]) -> bool:
    """Return whether the gateway routes to this step, and to no step that a rollback left."""
    left = c.execute("SELECT name FROM serving WHERE run_id = ? AND state = 'draining'", (run_id,))
    return name in routed and not any(row["name"] in routed for row in left)


def _progress(c: sqlite3.Connection, name: str, step: int, routed: frozenset[str], now: int = 0) -> api.Answer:
    row = c.execute("SELECT id, name, spec, state, reason FROM run WHERE name = ?", (name,)).fetchone()
    if row is None:
        raise NotFound(f"there is no run {name!r}", field="run")
    run = load_run(c, row["id"])
    served = served_step(c, row["id"])
    there = served > step or (served == step and _is_routed(c, row["id"], f"{name}@{step}", routed))
    if run.step >= step and there:
        return _step_info(c, row["id"], name, step)
    if hopeless := _hopeless(c, row, run, step):
        what = f": {row['reason']}" if row["reason"] else ""
        raise RequestError(f"run {name!r} is {run.state}{what}; step {step} will not {hopeless}. Next: artctl status")
    if is_stalled(run, step):
        sealed = len(run.sealed)
        return api.Stalled(
            step=run.step,
            sealed=sealed,
            trainable=sealed,
            needed=run.groups_per_step,
            discarded=_count_discarded(c, row["id"]),
        )
    phase = run.job or ("serve" if run.step >= step else "collect")
    return api.Pending(
        step=run.step,
        phase=phase,
        problem=_broken_worker(c, row["id"]) or _packing_problem(c, row["id"]),
        doing=_doing(c, now, row["id"], phase, step),
    )


def _doing(c: sqlite3.Connection, now: int, run_id: int, phase: str, step: int) -> str:
    """Describe for people what a wait is waiting for: a worker that starts, otherwise the phase."""
    job = c.execute("SELECT started FROM job WHERE run_id = ? AND state = 'running'", (run_id,)).fetchone()
    since = f", {max(0, now - job['started']) // 1000} s" if job and job["started"] else ""
    row = c.execute(f"{WORKERS} AND state = 'starting' ORDER BY name LIMIT 1", {"run": run_id}).fetchone()
    if row is not None and phase != "collect":
        return f"{label(row['kind'], row['replica'])} starting, {max(0, now - row['since']) // 1000} s"
    return {"collect": f"waiting for groups of step {step}", "serve": f"bringing step {step} into the engine",
            "init": f"making the first checkpoint{since}", "train": f"training step {step}{since}"}.get(phase, phase)  # fmt: skip


def _broken_worker(c: sqlite3.Connection, run_id: int) -> str:
    """Return which worker of the run the daemon no longer restarts, and why; "" when there is none."""
    row = c.execute(f"{WORKERS} AND state = 'broken' ORDER BY name LIMIT 1", {"run": run_id}).fetchone()
    return f"{label(row['kind'], row['replica'])} is broken: {telling(row['error'])}" if row else ""


def _packing_problem(c: sqlite3.Connection, run: int) -> str:
    """Return why the packer fails again and again on the run's next batch, "" when it does not."""
    told = failures.failing(c, run)
    if told is None or told["tries"] < 2:
        return ""
    return f"step {told['step']} cannot be packed: {telling(told['error'])}"


def _hopeless(c: sqlite3.Connection, row: sqlite3.Row, run: RunView, step: int) -> str:
    """Return what cannot happen to a step while the run stays in its state ("come" or "be served"); "" when it can
    still be served."""
    if run.state == "active":
        return ""
    if run.step < step:
        return "come"
    engines = engines_of(row["id"], stored_spec(row))
    failed = all(push_failed(c, row["id"], engine) for engine in engines)
    return "be served" if run.state == "finished" or failed else ""


def _step_info(c: sqlite3.Connection, run_id: int, name: str, step: int) -> api.StepInfo:
    row = c.execute(
        "SELECT k.sha, j.metrics, j.seconds FROM checkpoint k JOIN job j ON j.id = k.job_id WHERE k.run_id = ? AND k.step = ?"
        " AND k.abandoned = 0",
        (run_id, step),
    ).fetchone()
    return api.StepInfo(
        run=name,
        step=step,
        checkpoint=row["sha"],
        metrics=msgspec.json.decode(row["metrics"]),
        seconds=msgspec.json.decode(row["seconds"]),
    )

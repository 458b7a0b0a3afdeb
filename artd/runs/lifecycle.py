"""Creates, attaches to, pauses, resumes and finishes runs.

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

from artd.core.fleet import Unfinished, admission_error
from artd.errors import Conflict, Invalid, NotFound
from artd.models import names
from artd.models.base_model import check_family, pin, read_config
from artd.models.fetcher import Fetched, Fetcher
from artd.rollouts import slices
from artd.store.selects import NOT_DELETED, UNFINISHED
from artd.store.store import Store, emit, get_meta
from artd.store.views import learning_of, stored_spec, unreadable
from artd.supervise.packages import NO_PACKAGES, Packages
from artd.tables import pauses
from artd.tables.jobs import give_up, insert_init_job
from artd.tables.once import first_time
from artd.tables.pushes import hurry_pushes
from artd.tables.runs import insert_run
from artd_schema.codec import UNREADABLE, to_json
from artd_schema.crashpoint import reach
from artd_schema.data.base import BaseModel
from artd_schema.run.engines import UnknownEngine, engine_kind
from artd_schema.run.families import SEEDED
from artd_schema.run.losses import EXAMPLES
from artd_schema.run.spec import RunSpec, first_difference
from artd_schema.run.spec_rules import in_flight_error, layout_error, length_error, targets_error
from artd_schema.wire import client_api as api

from .learning import check_loss, check_rules, update_learning
from .progress import Routed, find_progress, served_step
from .waits import Waits

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Runs:
    """Answers the requests of clients about runs. `require_runtimes` raises RequestError when the trainer, or an engine
    of this kind, cannot run here. `routed` returns what the gateway confirmed to route.
    `packages` says what installed packages offer."""

    def __init__(
        self, store: Store, require_runtimes: Callable[[str], None], routed: Callable[[], Routed],
        models: Fetcher | None = None, packages: Packages = NO_PACKAGES,
    ) -> None:  # fmt: skip
        self._packages = packages
        self._models = models or Fetcher()
        self._store = store
        self._require_runtimes = require_runtimes
        self._waits = Waits(store, lambda c, key: find_progress(c, key, routed(), store.clock.now_ms()))

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
    if error := targets_error(spec):
        raise Invalid(error, field="spec.lora.targets")
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
    for row in c.execute(f"SELECT id, name, spec, learning FROM run WHERE {UNFINISHED}").fetchall():
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
        hurry_pushes(c, run_id)
    else:
        pauses.finish(c, now, run_id)

"""What a run learns with changes while the run goes on: the order `UpdateRun`.

The row `run.spec` stays what the run was made with: attaching compares with it, so an old program neither conflicts with a change nor
takes it back. `run.learning` has what counts now, with a version. The packer copies it into each train job's row.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from artd.errors import Conflict, Invalid, NotFound
from artd.store.store import emit
from artd.store.views import learning_of, stored_spec
from artd.supervise.packages import Offers
from artd.tables.once import first_time
from artd.tables.runs import set_learning
from artd_schema.codec import to_json
from artd_schema.run.loss_rules import loss_finding
from artd_schema.run.losses import LOSSES
from artd_schema.run.spec import Learning, LossSpec, RunSpec
from artd_schema.wire import client_api as api

SECTIONS = {"optimizer": "optimizer.lr=1e-6", "loss": "loss.clip_high=4.0"}
"""Fields of a spec that may change, each with an example."""


def update_learning(c: sqlite3.Connection, now: int, op: api.UpdateRun, losses: Offers) -> None:
    """Change what the run learns with; its next batch has it. Values that are there already change nothing.

    Raises NotFound, Conflict for a finished run, Unreadable, and Invalid for a field that may not change or a value that it may not have.
    """
    run = c.execute("SELECT id, name, spec, learning, state FROM run WHERE name = ?", (op.run,)).fetchone()
    if run is None:
        raise NotFound(f"there is no run {op.run!r}; `artctl runs` lists them", field="run")
    if run["state"] == "finished":
        raise Conflict(f"run {op.run!r} is finished, and learns nothing more; create another", field="run")
    before = learning_of(run)
    after = change(stored_spec(run), before, op.changes, losses)
    if not first_time(c, now, op.request) or after == before:
        return
    after = msgspec.structs.replace(after, version=before.version + 1)
    set_learning(c, run["id"], to_json(after))
    emit(
        c,
        now,
        run["name"],
        "run.updated",
        run["name"],
        version=after.version,
        changes=dict(_differences(before, after)),
    )


def change(spec: RunSpec, before: Learning, changes: Mapping[str, Any], losses: Offers) -> Learning:
    """Return `before` with these fields changed, of the same version. Raises Invalid."""
    _check_fields(changes)
    now = msgspec.structs.replace(spec, optimizer=before.optimizer, loss=before.loss)
    fields = msgspec.to_builtins(now)
    _merge(fields, changes)
    try:
        wanted = msgspec.convert(fields, RunSpec)
    except msgspec.ValidationError as error:
        raise Invalid(f"the run cannot learn with this: {error}", field="changes") from None
    check_loss(wanted.loss, losses)
    check_rules(wanted)
    return Learning(optimizer=wanted.optimizer, loss=wanted.loss, version=before.version)


def check_loss(spec: LossSpec, losses: Offers) -> None:
    """Raise Invalid if neither artd nor an installed package has the loss, or if artd's own loss has no such parameter."""
    if unknown := losses.missing(spec.kind):
        raise Invalid(f"loss.kind={spec.kind!r}: {unknown}", field="spec.loss.kind")
    if spec.kind in LOSSES and (extra := sorted((spec.params or {}).keys() - set(LOSSES[spec.kind]))):
        has = ", ".join(LOSSES[spec.kind]) or "none"
        raise Invalid(
            f"loss.params: {spec.kind!r} has no parameter {extra[0]!r}; it has: {has}. Leave it out",
            field="spec.loss.params",
        )


def check_rules(spec: RunSpec) -> None:
    """Raise Invalid for fields of loss, advantages or schedule that exclude each other."""
    if found := loss_finding(spec):
        raise Invalid(found[1], field=f"spec.{found[0]}")


def _check_fields(changes: Mapping[str, Any]) -> None:
    """Raise Invalid for the first field that may not change."""
    for name, value in changes.items():
        if name in SECTIONS and not isinstance(value, Mapping):
            raise Invalid(f"{name}: {value!r} is no set of fields: name one, such as {SECTIONS[name]}", field=name)
        if fixed := name if name not in SECTIONS else "loss.kind" if name == "loss" and "kind" in value else "":
            raise Invalid(
                f"{fixed} stays as the run was made: optimizer.* and loss.* may change, but for loss.kind. Make another run for it",
                field=fixed,
            )


def _merge(fields: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put `changes` into `fields`; None removes a field, which then has its default."""
    for name, value in changes.items():
        held = fields.get(name)
        if value is None:
            fields.pop(name, None)
        elif isinstance(value, Mapping):
            inner = dict(held) if isinstance(held, Mapping) else {}
            _merge(inner, value)
            fields[name] = inner
        else:
            fields[name] = value


def _differences(before: Learning, after: Learning) -> Iterator[tuple[str, list[Any]]]:
    """Yield (dotted name, [value before, value after]) of each field that differs; None: it is not there."""
    old, new = (dict(_flat(msgspec.to_builtins(each), "")) for each in (before, after))
    for name in sorted((old.keys() | new.keys()) - {"version"}):
        if old.get(name) != new.get(name):
            yield name, [old.get(name), new.get(name)]


def _flat(fields: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value

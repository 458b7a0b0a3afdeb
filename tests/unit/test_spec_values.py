"""A run's spec: every number is finite and bounded, is stored as it was asked for, and one that cannot be read stops its run only."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest
from msgspec import inspect

from artd.api.listing import read_rows
from artd.errors import Conflict, Invalid, Unreadable
from artd.recover import identify, recover
from artd.retention.checkpoints import CheckpointRetention
from artd.runs.lifecycle import Runs
from artd.serving.routing_table import load_table
from artd.store.migrate import SchemaMismatch, migrate
from artd.store.views import active_run, active_runs
from artd.store.writer import connect
from artd_schema.codec import Codec, WireError
from artd_schema.data import stored
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from tests.fakes.rows import EVERY_STEP, add_run, count, data_dir, make_ingest, one, open_store, stage, submit
from tests.fakes.steps import claim, commit_next, packed_run, serve

WIRE = Codec[api.Request](api.Request)
BAD = [
    ("group_timeout_s", math.inf), ("group_timeout_s", 0.0), ("group_timeout_s", math.nan), ("push_drain_s", math.inf),
    ("groups_per_step", 2**63), ("keep_checkpoints", 2**63), ("seed", 2**63), ("seed", -1), ("threads", 2**63),
    ("row_length", 2**40), ("optimizer.lr", math.inf), ("optimizer.lr", 1e300), ("optimizer.beta1", 1.0),
    ("optimizer.beta2", 1.5), ("optimizer.eps", 0.0), ("optimizer.weight_decay", math.nan), ("loss.clip_high", 0.0),
    ("loss.clip_high", math.inf), ("loss.clip_low", 0.0), ("loss.divisor", 2**40), ("lora.rank", 2**63), ("engine.max_model_len", 2**40), ("trainer.tensor_parallel", 2**40),
    ("model", ""),
]  # fmt: skip


def changed(path: str, value: Any) -> RunSpec:
    """A spec with one field changed, as a program makes it: nothing is checked there."""
    spec = RunSpec(model="/m", group_size=2)
    outer, _, inner = path.rpartition(".")
    if outer:
        value = msgspec.structs.replace(getattr(spec, outer), **{inner: value})
    return msgspec.structs.replace(spec, **{outer or inner: value})


@pytest.mark.parametrize(("path", "value"), BAD)
def test_a_number_without_meaning_is_refused_by_its_path(path, value):
    with pytest.raises(WireError, match=rf"op\.spec\.{path}"):
        WIRE.decode(WIRE.encode(api.Request(id=1, op=api.CreateRun(name="r", spec=changed(path, value)))))


def numbers(kind: Any, path: str = "") -> list[tuple[str, Any]]:
    """(path, type) of every number of a Struct."""
    if isinstance(kind, inspect.StructType):
        return [found for field in kind.fields for found in numbers(field.type, f"{path}.{field.name}".strip("."))]
    return [(path, kind)] if isinstance(kind, inspect.IntType | inspect.FloatType) else []


def test_every_number_of_a_spec_and_of_what_an_operator_asks_is_bounded_at_both_ends():
    found = numbers(inspect.type_info(RunSpec))
    assert len(found) == 40
    loose = [
        path for path, kind in found if (kind.ge is None and kind.gt is None) or (kind.le is None and kind.lt is None)
    ]
    assert loose == []
    for op in api.Op.__args__:
        for path, kind in numbers(inspect.type_info(op)):
            if (op, path) not in ((api.Hello, "protocol"), (api.Submit, "reward")):
                assert kind.le is not None, (op, path)


def test_the_longest_times_that_somebody_means_are_taken():
    for wish in (3600.0, 7 * 86400.0, 366 * 86400.0):
        spec = changed("group_timeout_s", wish)
        op = api.CreateRun(name="r", spec=spec)
        assert WIRE.decode(WIRE.encode(api.Request(id=1, op=op)))[0].op == op


@pytest.mark.asyncio
@pytest.mark.parametrize(("path", "value"), BAD[:-1:3])
async def test_what_would_be_read_back_as_another_spec_is_not_stored(tmp_path, path, value):
    """Whatever the codec lets through, the transaction that stores it proves it."""
    async with open_store(tmp_path) as store:
        with pytest.raises(Invalid, match="the spec cannot be stored"):
            outer, _, inner = path.rpartition(".")
            spec = getattr(changed(path, value), outer or inner)
            await add_run(store, **{outer or inner: spec})
        assert await count(store, "run") == 0 and await count(store, "job") == 0


@pytest.mark.parametrize("op", [
    api.List(what="jobs", after=2**63), api.List(what="jobs", limit=2**63), api.Events(after=2**63), api.CancelJob(job=2**63),
    api.WaitStep(run="r", step=2**63), api.Rollback(run="r", step=0, lineage=2**63), api.WaitStep(run="r", step=0, timeout_s=math.inf),
    api.Shutdown(drain_s=math.inf),
])  # fmt: skip
def test_a_number_that_sqlite_cannot_hold_is_invalid(op):
    with pytest.raises(WireError, match=r"\$\.op\."):
        WIRE.decode(WIRE.encode(api.Request(id=1, op=op)))


# ---- a spec that cannot be read ---------------------------------------------------------------------------------------

DAMAGE = [b'{"model": "/m", "group_timeout_s": null}', b'{"model": "/m", "other": 1}', b"{"]


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_run_whose_spec_cannot_be_read_is_paused_and_everything_else_lives(tmp_path, damage):
    data = data_dir(tmp_path)
    async with open_store(tmp_path) as store:
        await add_run(store)
        good = await one(store, "SELECT spec FROM run")

        async def boot(spec):
            await store.write(lambda c: c.execute("UPDATE run SET spec = ?", (spec,)))
            await recover(store, data)

        await boot(damage)
        (run,) = await store.read("SELECT state, reason FROM run")
        assert run["state"] == "paused" and "the spec of run 'r' cannot be read" in run["reason"]
        runs, ingest = Runs(store, lambda _: None, EVERY_STEP), make_ingest(store, data)
        assert await store.write(active_runs) == [] and await store.write(lambda c: active_run(c, 1)) is None
        assert (await store.write(load_table)).engines == ()
        assert await store.write(CheckpointRetention(store, data)._retire) == []
        assert await read_rows(store, api.List(what="jobs", run="r"))
        for asked in (
            runs.create(api.CreateRun(name="r", spec=changed("seed", 1))), runs.wait(api.WaitStep(run="r", step=1)),
            runs.set_state("r", "active"), submit(ingest),
        ):  # fmt: skip
            with pytest.raises(Unreadable, match=r"cannot be read: .* Next: start the artd that wrote it"):
                await asked
        found = await runs.create(api.CreateRun(name="r"))
        assert isinstance(found, api.RunInfo) and found.spec is None
        with pytest.raises(Conflict, match="run 'r' is"):
            await add_run(store, "other")
        await boot(good)  # an artd that reads it
        assert await one(store, "SELECT state FROM run") == "active"
        await boot(damage)
        await runs.set_state("r", "finished")
        await add_run(store, "other")
        assert (await runs.info("other", False)).state == "active"


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_boot_outlives_an_unreadable_spec_with_all_its_work(tmp_path, damage):
    """A finished result that was staged, an open group, and a job that waits for its time."""
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path)
        order = await claim(store, data)
        stage(Path(order.dir), order)
        await submit(make_ingest(store, data), group="open")
        good = await one(store, "SELECT spec FROM run")

        async def boot(spec):
            await store.write(lambda c: c.execute("UPDATE run SET spec = ?", (spec,)))
            await store.write(lambda c: identify(c, data, store.clock.now_ms()))
            await recover(store, data)

        await boot(damage)
        assert await one(store, "SELECT state FROM run") == "paused"
        assert await one(store, "SELECT state FROM job WHERE kind = 'train'") == "queued"
        due = store.clock.now_ms() + 30_000
        await store.write(lambda c: c.execute("UPDATE job SET not_before = ? WHERE state = 'queued'", (due,)))
        for spec in (damage, good):
            await boot(spec)
            left = await one(store, "SELECT deadline FROM trajectory_group WHERE state = 'open'") - store.clock.now_ms()
            assert 0 < left <= RunSpec(model="/m").group_timeout_s * 1000
            assert 20_000 < await one(store, "SELECT max(not_before) FROM job") - store.clock.now_ms() <= 30_000
        assert await one(store, "SELECT state FROM run") == "active"


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", DAMAGE)
async def test_a_change_that_cannot_be_read_pauses_its_run(tmp_path, damage):
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path)
        runs = Runs(store, lambda _: None, EVERY_STEP)
        await store.write(lambda c: c.execute("UPDATE run SET learning = ?", (damage,)))
        await recover(store, data)
        assert await one(store, "SELECT state FROM run") == "paused"
        assert await store.write(active_runs) == []
        found = await runs.create(api.CreateRun(name="r"))
        assert isinstance(found, api.RunInfo) and found.learning is None
        with pytest.raises(Unreadable, match="cannot be read"):
            await runs.update(api.UpdateRun(run="r", changes={"optimizer": {"lr": 1e-4}}))


@pytest.mark.asyncio
@pytest.mark.parametrize("damage", DAMAGE)
async def test_another_run_is_kept_in_order_beside_a_finished_one_whose_spec_is_lost(tmp_path, damage):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, rollout_weights_mode="lora")
        await commit_next(store, data)
        await serve(store)
        await Runs(store, lambda _: None, EVERY_STEP).set_state("r", "finished")
        await store.write(lambda c: c.execute("UPDATE run SET spec = ?", (damage,)))
        await add_run(store, "other", rollout_weights_mode="lora")
        await store.write(lambda c: c.execute(
            "INSERT INTO checkpoint (run_id, step, epoch, lineage, job_id, sha, dir, bytes, state, created)"
            " SELECT r.id, 0, 1, 0, j.id, '', 'other', 0, 'committed', 0 FROM run r JOIN job j ON j.run_id = r.id"
            " WHERE r.name = 'other'"
        ))  # fmt: skip
        assert await store.write(CheckpointRetention(store, data)._retire) == []
        assert await count(store, "checkpoint", "state = 'committed'") == 2


# ---- another artd's Structs ---------------------------------------------------------------------------------------------


def test_rows_of_other_structs_are_a_schema_mismatch(tmp_path, monkeypatch):
    connection = connect(tmp_path / "artd.db")
    try:
        migrate(connection)
        kept = stored.form()
        monkeypatch.setattr("artd.store.migrate.form", lambda: "f" * 64)
        with pytest.raises(SchemaMismatch, match="another version of artd wrote"):
            migrate(connection)
        monkeypatch.setattr("artd.store.migrate.READABLE", frozenset({kept}))
        migrate(connection)  # a later artd that reads this one's
        monkeypatch.setattr("artd.store.migrate.READABLE", frozenset())
        migrate(connection)
        monkeypatch.undo()
        with pytest.raises(SchemaMismatch, match="another version of artd"):
            migrate(connection)
    finally:
        connection.close()


def test_the_form_follows_fields_and_bounds_and_not_words():
    def form_of(*fields: tuple, **namespace: str) -> str:
        return stored.form_of((msgspec.defstruct("One", fields, namespace=namespace),))

    number = Annotated[int, msgspec.Meta(ge=0)]
    forms = {form_of(("a", int, 0)), form_of(("a", number, 0)), form_of(("a", int, 0), ("b", int, 0))}
    assert len(forms) == 3
    assert form_of(("a", int, 0), __doc__="Words.") == form_of(("a", int, 0), __doc__="Other words.") in forms

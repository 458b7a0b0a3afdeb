"""What the services ask of the database, of rows that a run of weeks has by the million: nothing reads a whole table."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from artd.api.job_orders import end_job
from artd.cli import read
from artd.cli.daemon_probe import Daemon
from artd.cli.status.snapshot import Snapshot, _fill
from artd.config import Retention
from artd.retention import clock_jumps
from artd.retention.checkpoints import CheckpointRetention
from artd.retention.collector import Collector
from artd.runs.lifecycle import Runs
from artd.runs.rollback import rollback
from artd.serving.pusher import Pusher
from artd.serving.routing_table import load_table
from artd.store import pages, samples
from artd.store.blobs import Blobs
from artd.store.migrate import migrate
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from tests.cli.rows import busy
from tests.fakes.rows import (
    ENGINE,
    TRAINER,
    FakeWire,
    add_run,
    add_worker,
    by_reference,
    data_dir,
    exchange,
    make_ingest,
    open_store,
    submit,
)
from tests.fakes.rows import EVERY_STEP as ROUTED
from tests.fakes.steps import claim, commit_next, make_dispatch, make_pusher, pack, serve, train_next

SMALL = (
    "process",
    "p",
    "meta",
    "exchange_count",
    "CONSTANT",
    "ref",
    "pragma_foreign_key_list",
    "sqlite_schema",
    "json_each",
    "(subquery",
)
"""Tables, by name or alias, that neither a run nor the number of runs grows; a subquery has steps of its own."""
BOUNDED = ("group_open", "batch_tensors", "run_state", "process_alive")
"""Partial indexes of what is not over yet, or kept still; and an index that has a number and a word for each run."""
NEWEST = re.compile(r"ORDER BY [\w ,]*DESC LIMIT 1$|FROM \w+\s+ORDER BY id( DESC)? LIMIT \d+")
"""Read backwards, and only to the first that fits; or by id, and only so many."""
OF_A_RUN = re.compile(r"USING (COVERING )?INDEX \w+_run \(run_id=\?( AND state=\?)?\)")
"""All rows of a run, or all in one state: as good as the whole table."""


def scans(c: sqlite3.Connection, sql: str) -> list[str]:
    """Whole tables that a statement reads."""
    steps = [row[3] for row in c.execute(f"EXPLAIN QUERY PLAN {sql}")]
    found = [step for step in steps if step.startswith("SCAN")]
    whole = [
        step
        for step in found
        if step.split()[1].partition("-")[0] not in SMALL
        and step.rpartition(" ")[2] not in BOUNDED
        and not NEWEST.search(sql)
    ]
    return whole + [step for step in steps if OF_A_RUN.search(step) and "LIMIT" not in sql]


def asked_of(c: sqlite3.Connection, fn: Callable[[sqlite3.Connection], object]) -> list[str]:
    """The statements that it runs, with their values."""
    found: list[str] = []
    c.set_trace_callback(found.append)
    fn(c)
    c.set_trace_callback(None)
    return [sql for sql in found if re.match(r"\s*(SELECT|WITH)", sql)]


@pytest.fixture(scope="module")
def empty() -> sqlite3.Connection:
    c = sqlite3.connect(":memory:", isolation_level=None)
    migrate(c)
    c.executemany(
        "INSERT INTO run (name, spec, base_digest, base_manifest, vocab_size, state, created) VALUES (?, x'', '', x'', 1, ?, 0)",
        [("old", "finished"), ("r", "active")],
    )
    c.execute(
        "INSERT INTO trajectory_group (run_id, name, split, state, deadline, created) VALUES (2, 'g', 'train', 'open', 0, 0)"
    )
    return c


@pytest.mark.parametrize("bounds", [{}, {"before": 9}, {"after": 9}, {"after": 1, "before": 9}], ids=str)
@pytest.mark.parametrize("what", sorted(set(pages.QUERIES) - {"runs", "workers"}))
def test_no_listing_reads_or_sorts_a_whole_table(empty: sqlite3.Connection, what: str, bounds: dict[str, int]) -> None:
    known = pages.states_of(what)
    filters: list[dict[str, Any]] = [{}, {"run": "r"}]
    if known:
        filters += [{"run": run, "states": states} for run in ("", "r") for states in (known[:1], known)]
    if what == "trajectories":
        filters += [{"group": "g"}, {"run": "r", "group": "g", "states": known[:1]}]
    for asked in filters:
        for sql in asked_of(empty, lambda c: pages.read(c, pages.Page(what, **asked, **bounds))):  # noqa: B023
            steps = [row[3] for row in empty.execute(f"EXPLAIN QUERY PLAN {sql}")]
            assert scans(empty, sql) == [] and "TEMP B-TREE" not in " ".join(steps), (asked, sql, steps)


@pytest.mark.parametrize(("step", "split"), [(None, "train"), (None, "eval"), (3, "train")])
def test_no_choice_of_samples_reads_a_whole_table(empty: sqlite3.Connection, step: int | None, split: str) -> None:
    choice = samples.Choice(step, split, "best")
    for sql in asked_of(empty, lambda c: samples.choose(c, "r", choice)):
        steps = [row[3] for row in empty.execute(f"EXPLAIN QUERY PLAN {sql}")]
        assert scans(empty, sql) == [] and "TEMP B-TREE" not in " ".join(steps), (sql, steps)


def test_no_verb_that_reads_rows_reads_a_whole_table(tmp_path: Path) -> None:
    with closing(busy(tmp_path).connection):
        database = read.Database(tmp_path)
        sqls = asked_of(database._connection, lambda c: _fill(Snapshot(tmp_path, Daemon("ready", None)), database))
        assert len(sqls) > 15
        assert {sql: found for sql in sqls if (found := scans(database._connection, sql))} == {}
        database.close()


@pytest.mark.asyncio
async def test_no_service_reads_a_whole_table(tmp_path):
    asked: dict[str, None] = {}
    async with open_store(tmp_path) as store:
        read = store.read

        async def noted(sql, parameters=()):
            for value in parameters:
                sql = sql.replace("?", repr(value), 1)
            asked[sql] = None
            return await read(sql)

        store.read = noted
        store._writer._connection.set_trace_callback(lambda sql: asked.__setitem__(sql, None))
        await live(store, data_dir(tmp_path))
        store._writer._connection.set_trace_callback(None)
    with closing(sqlite3.connect(tmp_path / "artd.db")) as c:
        wanted = [sql for sql in asked if re.match(r"SELECT|UPDATE|DELETE|WITH", sql)]
        assert len(wanted) > 100
        assert {sql: found for sql in wanted if (found := scans(c, sql))} == {}


async def live(store, data):
    """A bit of everything that the services do while the daemon runs."""
    await add_run(store)
    await commit_next(store, data)
    await serve(store, 1, data)
    ingest, runs = make_ingest(store, data), Runs(store, lambda _: None, ROUTED)
    dispatch, wire = make_dispatch(store, data), FakeWire(trainer=1, engine=1, gateway=1)
    pusher: Pusher = make_pusher(store, data, wire)
    await exchange(ingest)
    await ingest.submit(by_reference(("resp-1",), group="refs"), [])
    await ingest.seal(api.Seal(run="r", group="refs"))
    for _ in range(2):
        await train_next(store, data)
        await pusher._send_due(ENGINE)
        push = wire.of(w.Push)[-1]
        await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))
        await store.write(load_table)
        await runs.wait(api.WaitStep(run="r", step=9, timeout_s=0.0))
    await store.write(ingest._seal_due)
    await store.write(CheckpointRetention(store, data)._retire)
    order = await claim_another(store, data, dispatch)
    await dispatch.late(w.Staged(job=order.job, fence=0, dir=order.dir, manifest_sha="0" * 64))
    await dispatch.take_failed(TRAINER, w.Failed(job=order.job, fence=order.fence, failure="interrupted", error="x"))
    await dispatch.take_back(TRAINER, 1, True, "gone")
    await store.write(lambda c: end_job(c, 0, order.job, True))
    await store.write(lambda c: rollback(c, 0, api.Rollback(run="r", step=1, lineage=0)))
    await runs.wait(api.WaitStep(run="r", step=1, timeout_s=0.0))
    await pusher.engine_died(ENGINE, "gone")
    await add_worker(store, "engine", 2, "ready", "/e.sock")
    for _ in range(2):
        await pusher._send_due(ENGINE)
    await store.write(lambda c: clock_jumps.follow(c, store.clock.now_ms(), 10_000))
    await Collector(store, Blobs(data.blobs), Retention()).collect()


async def claim_another(store, data, dispatch):
    """The order of a train job that is not staged."""
    ingest = make_ingest(store, data)

    for number in range(2):
        await submit(ingest, group="last", key=f"last-{number}", reward=float(number))
    assert await pack(store, data)
    return await claim(store, data, dispatch)

"""store.writer and store.store on real SQLite files: group commit, errors that stay with their write, full disks."""

from __future__ import annotations

import asyncio
import sqlite3
import threading

import aiosqlite
import pytest

from artd.core.states import IllegalTransition
from artd.store import writer as writer_module
from artd.store.store import Store, emit, get_meta, move, set_meta
from artd.store.writer import StoreFull, connect
from tests.awake import SOON_S
from tests.fakes.rows import FakeClock, add_run, count, one, open_store

pytestmark = pytest.mark.asyncio


def put(key):
    return lambda c: set_meta(c, str(key), "x" * 100)


class Gate:
    """A write that holds the writer thread until opened, so that others queue up behind it."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self._entered = threading.Event()

    def __call__(self, c: sqlite3.Connection) -> None:
        self._entered.set()
        assert self._open.wait(SOON_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, SOON_S)

    def open(self) -> None:
        self._open.set()


async def test_many_writes_share_few_commits(tmp_path):
    async with open_store(tmp_path) as store:
        commits, _ = store.commits
        await asyncio.gather(*(store.write(put(i)) for i in range(500)))
        assert await count(store, "meta", "length(value) = 100") == 500
        assert store.commits[0] - commits <= 10
        assert store.commits[1] >= 500


async def test_a_group_is_bounded(tmp_path):
    async with open_store(tmp_path) as store:
        gate = Gate()
        held = store.submit(gate)
        await gate.entered()
        rest = [store.submit(put(i)) for i in range(writer_module.MAX_GROUP + 1)]
        commits = store.commits[0]
        gate.open()
        await asyncio.gather(held, *rest)
        assert store.commits[0] - commits == 3  # the gate, MAX_GROUP, the last one


async def test_an_exception_fails_its_own_write_only(tmp_path):
    async with open_store(tmp_path) as store:
        gate = Gate()

        def bad(c):
            set_meta(c, "half", "done")
            raise ValueError("no")

        futures = [store.submit(fn) for fn in (gate, put("before"), bad, put("after"))]
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[2], ValueError) and results[1] is results[3] is None
        rows = {row[0] for row in await store.read("SELECT key FROM meta")}
        assert {"before", "after"} <= rows and "half" not in rows


async def test_a_statement_that_fails_leaves_the_others(tmp_path):
    async with open_store(tmp_path) as store:
        gate = Gate()
        double = lambda c: c.execute("INSERT INTO meta (key, value) VALUES ('twice', '')")  # noqa: E731
        futures = [store.submit(fn) for fn in (gate, double, double, put("after"))]
        gate.open()
        results = await asyncio.gather(*futures, return_exceptions=True)
        assert isinstance(results[2], sqlite3.IntegrityError)
        assert await count(store, "meta", "key IN ('twice', 'after')") == 2


async def test_a_cancelled_callers_write_still_happens(tmp_path):
    async with open_store(tmp_path) as store:
        gate = Gate()
        held = store.submit(gate)
        caller = asyncio.ensure_future(store.write(put("kept")))
        await asyncio.sleep(0)
        caller.cancel()
        gate.open()
        await held
        with pytest.raises(asyncio.CancelledError):
            await caller
        await store.write(lambda c: None)
        assert await count(store, "meta", "key = 'kept'") == 1


async def test_the_answer_comes_after_the_commit(tmp_path):
    async with open_store(tmp_path) as store:
        other = sqlite3.connect(store.path)
        for i in range(20):
            await store.write(put(i))
            assert other.execute("SELECT count(*) FROM meta WHERE key = ?", (str(i),)).fetchone() == (1,)
        other.close()


async def test_a_full_disk_fails_the_group_and_heals(tmp_path):
    async with open_store(tmp_path) as store:
        await store.write(put("first"))

        def limit(pages):
            return lambda c: c.execute(f"PRAGMA max_page_count = {pages}").fetchone()[0]

        await store.write(limit(1))  # clamped to what is used
        gate = Gate()
        small = store.submit(gate), store.submit(lambda c: set_meta(c, "small", ""))
        large = store.submit(lambda c: set_meta(c, "large", "x" * 1_000_000))
        gate.open()
        results = await asyncio.gather(*small, large, return_exceptions=True)
        assert all(isinstance(result, StoreFull) for result in results), results
        assert "free space" in str(results[0])
        assert await count(store, "meta", "key IN ('small', 'large')") == 0
        assert await count(store, "meta", "key = 'first'") == 1
        await store.write(limit(1 << 30))
        await store.write(lambda c: set_meta(c, "large", "x" * 1_000_000))
        assert await count(store, "meta", "key = 'large'") == 1


async def test_an_error_of_commit_ends_the_daemon_and_answers_nobody(tmp_path, monkeypatch):
    deaths: list[BaseException] = []
    died = threading.Event()

    def fatal(error):
        deaths.append(error)
        died.set()

    store = Store(tmp_path / "artd.db", FakeClock(), fatal)

    class Failing:
        """A connection whose COMMIT raises as on an I/O error."""

        def __init__(self, inner):
            self._inner = inner

        def __getattr__(self, name):
            return getattr(self._inner, name)

        def execute(self, sql, *rest):
            if sql == "COMMIT":
                raise sqlite3.OperationalError("disk I/O error")
            return self._inner.execute(sql, *rest)

    await store.open()
    await store.write(put("fine"))
    store._writer._connection = failing = Failing(store._writer._connection)
    futures = [store.submit(put(i)) for i in range(3)]
    assert await asyncio.to_thread(died.wait, SOON_S)
    await asyncio.sleep(0.05)
    assert "disk I/O error" in str(deaths[0]) and not any(future.done() for future in futures)
    later = store.submit(put("later"))
    await asyncio.sleep(0.05)
    assert not later.done() and len(deaths) == 1
    await store.close()
    failing._inner.close()


async def test_pragmas_of_the_writer(tmp_path):
    connection = connect(tmp_path / "a.db")
    wanted = {
        "journal_mode": "wal",
        "synchronous": 2,
        "foreign_keys": 1,
        "wal_autocheckpoint": 0,
        "auto_vacuum": 2,
        "trusted_schema": 0,
        "recursive_triggers": 1,
    }
    connection.execute("CREATE TABLE t (a)")
    assert {name: connection.execute(f"PRAGMA {name}").fetchone()[0] for name in wanted} == wanted
    connection.close()


async def test_only_the_writer_checkpoints(tmp_path):
    async with open_store(tmp_path) as store:
        reader = store._reader
        assert isinstance(reader, aiosqlite.Connection)
        wal = store.path.with_name("artd.db-wal")
        await store.write(lambda c: set_meta(c, "big", "x" * 100_000))
        before = wal.stat().st_size
        with pytest.raises(sqlite3.OperationalError):
            await reader.execute("INSERT INTO meta (key, value) VALUES ('a', 'b')")
        await store.read("SELECT count(*) FROM meta")
        assert wal.stat().st_size == before > 100_000
    assert not wal.exists()  # truncated and removed at the end


async def test_the_wal_is_checkpointed_once_per_span_not_at_every_commit(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "CHECKPOINT_BYTES", 200_000)
    checkpoints = []
    async with open_store(tmp_path) as store:
        connection = store._writer._connection
        connection.set_trace_callback(lambda sql: checkpoints.append(sql) if "wal_checkpoint" in sql else None)
        for i in range(100):
            await store.write(lambda c, i=i: set_meta(c, str(i), "x" * 20_000))
            if i % 10 == 0:
                await asyncio.sleep(0.02)  # nobody waits: time for a checkpoint
        await asyncio.sleep(0.05)
        grown = len(checkpoints)
        assert 3 <= grown <= 30, grown
        for i in range(20):
            await store.write(lambda c, i=i: set_meta(c, "small", str(i)))
            await asyncio.sleep(0.002)
        assert len(checkpoints) <= grown + 2
        assert store.path.with_name("artd.db-wal").stat().st_size < 1_000_000


async def test_a_wal_that_grows_under_constant_load_is_checkpointed_too(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "CHECKPOINT_BYTES", 50_000)
    monkeypatch.setattr(writer_module, "CHECKPOINT_BUSY_BYTES", 300_000)
    checkpoints = []
    async with open_store(tmp_path) as store:
        store._writer._connection.set_trace_callback(lambda q: checkpoints.append(q) if "wal_checkpoint" in q else None)
        gates = [Gate() for _ in range(12)]
        futures = []
        for number, gate in enumerate(gates):  # each opens only when more waits behind it: the queue is never empty
            futures.append(store.submit(gate))
            if number:
                await gates[number - 1].entered()
                futures.append(store.submit(lambda c, n=number: set_meta(c, str(n), "x" * 50_000)))
                gates[number - 1].open()
        assert checkpoints
        gates[-1].open()
        await asyncio.gather(*futures)


async def test_readers_cannot_write(tmp_path):
    async with open_store(tmp_path) as store:
        with pytest.raises(sqlite3.OperationalError, match="readonly|read-only"):
            await store.read("DELETE FROM meta")


async def test_stop_finishes_what_is_queued(tmp_path):
    async with open_store(tmp_path) as store:
        futures = [store.submit(put(i)) for i in range(50)]
    assert all(future.done() for future in futures) or await asyncio.gather(*futures)
    connection = sqlite3.connect(tmp_path / "artd.db")
    assert connection.execute("SELECT count(*) FROM meta WHERE length(value) = 100").fetchone() == (50,)
    connection.close()


async def test_change_is_announced_for_changes_only(tmp_path):
    async with open_store(tmp_path) as store:
        changed = store.change()
        await store.write(lambda c: c.execute("SELECT 1").fetchone()[0])
        await asyncio.sleep(0.02)
        assert not changed.is_set()
        await store.write(put("a"))
        await asyncio.wait_for(changed.wait(), SOON_S)
        assert store.change() is not changed


async def test_move_follows_the_table_and_the_row(tmp_path):
    async with open_store(tmp_path) as store:
        run = await add_run(store)
        await store.write(lambda c: move(c, "run", run, "paused", reason="lunch"))
        assert await one(store, "SELECT reason FROM run") == "lunch"
        with pytest.raises(IllegalTransition, match="run 1 is paused"):
            await store.write(lambda c: move(c, "run", run, "paused"))
        with pytest.raises(IllegalTransition, match="'finished' may not become 'active'"):
            await store.write(lambda c: move(c, "run", run, "active", start="finished"))
        with pytest.raises(IllegalTransition, match="not there"):
            await store.write(lambda c: move(c, "run", 77, "active"))


async def test_events_are_in_the_transaction_of_their_change(tmp_path):
    async with open_store(tmp_path) as store:

        def bad(c):
            emit(c, 1, "r", "thing.done", 7, number=1)
            raise ValueError

        with pytest.raises(ValueError):
            await store.write(bad)
        assert await count(store, "event") == 0
        await store.write(lambda c: emit(c, 1, "r", "thing.done", 7, number=1))
        (row,) = await store.read("SELECT * FROM event")
        assert (row["ref"], row["data"]) == ("7", b'{"number":1}')
        assert await store.write(lambda c: get_meta(c, "nothing", "else")) == "else"

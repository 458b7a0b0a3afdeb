"""Free space: what stops at the low mark goes on at the high one, and the reserve is there when it is needed."""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from artd.datadir.disk import RESERVE, Disk, give_up
from artd.errors import Busy
from artd.packing import service
from artd.store import store as store_module
from artd.store import writer as writer_module
from artd.store.blobs import Blobs
from artd.store.fs import is_full
from artd.store.store import set_meta
from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.fakes.rows import (
    TRAINER,
    FakeClock,
    FakeWire,
    add_run,
    count,
    data_dir,
    make_ingest,
    one,
    open_store,
    stage,
    submit,
)
from tests.fakes.steps import claim, commit_next, make_dispatch, pack, pack_here, staged

pytestmark = pytest.mark.asyncio
MIB = 1 << 20


class Space:
    """What statvfs says, in MiB; a reserve counts as its file does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: float) -> None:
        self.clock = FakeClock()
        self.answer = SimpleNamespace(f_bavail=int(free * 4), f_frsize=MIB // 4, f_flag=0, f_files=0, f_favail=0)
        monkeypatch.setattr(os, "statvfs", lambda path: self.answer)

    def now(self, free: float) -> None:
        self.answer.f_bavail = int(free * 4)
        self.clock.advance(1.0)


async def test_admission_stops_at_the_low_mark_and_goes_on_at_the_high_one(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 9)
    disk = Disk(tmp_path, 10 * MIB, space.clock)
    with pytest.raises(Busy, match=r"nearly full.*until 12 MiB are free.*9 MiB are free now") as error:
        disk.require()
    assert error.value.retry_after_s > 0
    space.answer.f_bavail = 100 * 4
    with pytest.raises(Busy):
        disk.require()  # read at most once a second
    for free, refused in ((11, True), (12, True), (12.5, False), (10, False), (9.75, True), (12, True), (13, False)):
        space.now(free)
        assert bool(disk.why()) == refused, free


async def test_a_read_only_disk_takes_nothing_until_it_is_writable(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 100)
    disk = Disk(tmp_path, 10 * MIB, space.clock)
    disk.require()
    space.answer.f_flag = os.ST_RDONLY
    space.now(100)
    with pytest.raises(Busy, match="mounted read-only"):
        disk.require()
    space.answer.f_flag = 0
    space.now(100)
    disk.require()


async def test_the_reserve_is_made_given_up_and_made_again(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 100)
    async with open_store(tmp_path, space.clock) as store:
        disk = Disk(tmp_path, 10 * MIB, space.clock, 4 * MIB)
        assert disk.free() == 96 * MIB  # the reserve is not there yet, and counts as used
        await disk.tend(store)
        assert (tmp_path / RESERVE).stat().st_blocks * 512 >= 4 * MIB
        told = "SELECT group_concat(kind) FROM event"
        assert await one(store, told) is None
        space.now(9)
        await disk.tend(store)
        assert (tmp_path / RESERVE).exists() and "nearly full" in await one(
            store, "SELECT value FROM meta WHERE key = 'disk'"
        )
        space.now(0.75)
        await disk.tend(store)
        assert not (tmp_path / RESERVE).exists()
        space.now(15)  # with the reserve made again only 11 would be left: it would flap
        await disk.tend(store)
        assert disk.why() and not (tmp_path / RESERVE).exists()
        space.now(16.5)
        await disk.tend(store)
        assert not disk.why() and (tmp_path / RESERVE).exists()
        assert await one(store, told) == "disk.low,disk.healed"
        assert await one(store, "SELECT value FROM meta WHERE key = 'disk'") == ""


async def test_busy_is_what_a_client_hears_and_nothing_acknowledged_is_lost(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 100)
    async with open_store(tmp_path, space.clock) as store:
        disk = Disk(tmp_path, 10 * MIB, space.clock)
        ingest = make_ingest(store, data_dir(tmp_path))
        ingest._admit = disk.require
        await add_run(store)
        await submit(ingest, key="a")
        space.now(1)
        for refused in (submit(ingest, key="b"), ingest.exchange(w.Exchange(
            response_id="x", run="r", model="r@0", split="train", sampling=None, choices=0, prompt_tokens=0,
            completion_tokens=0, seconds=0.0), [])):  # fmt: skip
            with pytest.raises(Busy):
                await refused
        assert await count(store, "trajectory") == 1
        space.now(100)
        assert not (await submit(ingest, key="b")).duplicate
        assert (await submit(ingest, key="a")).duplicate


# ---- dispatch -------------------------------------------------------------------------------------------------------


async def a_queued_train_job(store, data):
    await add_run(store)
    await commit_next(store, data)
    ingest = make_ingest(store, data)
    for number in range(2):
        await submit(ingest, group="g", key=str(number), reward=float(number))
    assert await pack(store, data)


async def test_a_train_job_waits_for_room_for_two_checkpoints(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 100)
    async with open_store(tmp_path, space.clock) as store:
        data = data_dir(tmp_path)
        await a_queued_train_job(store, data)
        await store.write(lambda c: c.execute("UPDATE checkpoint SET bytes = ?", (20 * MIB,)).rowcount)
        disk = Disk(tmp_path, 10 * MIB, space.clock)
        dispatch = make_dispatch(store, data)
        dispatch._lacks = disk.lacks
        space.now(49)
        for _ in range(3):
            with pytest.raises(AssertionError, match="no job is due"):
                await claim(store, data, dispatch)
        assert await count(store, "event", "kind = 'job.waiting'") == 1
        assert "50 MiB must be free" in await one(store, "SELECT waiting FROM job WHERE kind = 'train'")
        space.now(50)
        assert (await claim(store, data, dispatch)).step == 1
        assert await one(store, "SELECT waiting FROM job WHERE kind = 'train'") == ""


async def test_nothing_is_packed_while_there_is_no_room(tmp_path: Path, monkeypatch) -> None:
    space = Space(monkeypatch, 9)
    monkeypatch.setattr(service, "RETRY_S", 0.01)
    monkeypatch.setattr(service, "run_child", pack_here)
    async with open_store(tmp_path, space.clock) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        for number in range(2):
            await submit(ingest, group="g", key=str(number), reward=float(number))
        asked: list[str] = []
        disk = Disk(tmp_path, 10 * MIB, space.clock)

        def lacks(needed: int) -> str:
            asked.append(disk.lacks(needed))
            return asked[-1]

        packing = asyncio.create_task(service.Packer(store, Blobs(data.blobs), data, lacks).run())
        await until(lambda: len(asked) >= 3)
        assert all(asked) and await count(store, "batch") == 0
        space.now(20)
        await until(lambda: count(store, "batch"))
        packing.cancel()


async def test_a_result_that_the_disk_cannot_keep_is_interrupted_and_never_counted(tmp_path: Path, monkeypatch) -> None:
    async with open_store(tmp_path) as store:
        data, wire = data_dir(tmp_path), FakeWire(trainer=1)
        await a_queued_train_job(store, data)
        dispatch = make_dispatch(store, data, wire)
        order = await claim(store, data, dispatch)

        def full(*_: object) -> str:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr("artd.training.commit.publish", full)
        await dispatch.take_staged(TRAINER, staged(order, stage(Path(order.dir), order)))
        assert wire.of(w.Fenced) and not Path(order.dir).exists()
        row = (await store.read("SELECT state, attempts, deaths FROM job WHERE id = ?", (order.job,)))[0]
        assert tuple(row) == ("queued", 0, 0)
        with pytest.raises(AssertionError, match="no job is due"):  # what it had staged is gone, and looks like space
            await claim(store, data, dispatch)
        assert await one(store, "SELECT outcome FROM attempt WHERE job_id = ?", order.job) == "interrupted"


# ---- the writer -----------------------------------------------------------------------------------------------------


class Cramped:
    """A connection whose next `left` COMMITs find no room, as when the WAL cannot grow: SQLite takes them back."""

    def __init__(self, inner: sqlite3.Connection, left: int) -> None:
        self.inner, self.left = inner, left

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)

    def execute(self, sql: str, *rest: object) -> object:
        if sql == "COMMIT" and self.left > 0:
            self.left -= 1
            self.inner.execute("ROLLBACK")
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return self.inner.execute(sql, *rest)


async def test_a_commit_without_room_is_answered_only_when_the_next_one_succeeds(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "FULL_RETRY_S", 0.01)
    monkeypatch.setattr(store_module, "FULL_RETRY_S", 0.01)
    async with open_store(tmp_path) as store:
        await add_run(store)
        freed: list[int] = []
        store.on_full(lambda: freed.append(cramped.left))
        cramped = store._writer._connection = Cramped(store._writer._connection, 4)
        future = store.submit(lambda c: set_meta(c, "lost", "1"))
        with pytest.raises(writer_module.StoreFull):
            await future
        assert cramped.left == 0 and freed[:4] == [3, 2, 1, 0]
        assert await count(store, "meta", "key = 'lost'") == 0
        cramped.left = 2
        await store.write(lambda c: set_meta(c, "kept", "1"))  # a service's write waits, and is done again
        assert await count(store, "meta", "key = 'kept'") == 1
        store._writer._connection = cramped.inner


async def test_a_daemon_that_ends_does_not_wait_for_a_full_disk(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "FULL_RETRY_S", 0.01)
    monkeypatch.setattr(store_module, "FULL_RETRY_S", 0.01)
    ends: list[BaseException] = []
    async with open_store(tmp_path, on_fatal=ends.append) as store:
        pages = await store.write(lambda c: c.execute("PRAGMA max_page_count = 1").fetchone()[0])
        large = asyncio.ensure_future(store.write(lambda c: set_meta(c, "large", "x" * 4096 * pages)))
        await asyncio.sleep(0.05)
        assert not large.done()
        store.hurry()
        with pytest.raises(writer_module.StoreFull):
            await large
        assert isinstance(ends[0], writer_module.StoreFull)


async def test_a_daemon_that_ends_gives_a_commit_without_room_three_more_tries(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "FULL_RETRY_S", 0.01)
    died = threading.Event()
    ends: list[BaseException] = []
    rooms: list[int] = []

    def make_room() -> None:
        rooms.append(len(rooms))
        if len(rooms) == 5:
            store.hurry()

    def fatal(error: BaseException) -> None:
        ends.append(error)
        died.set()

    async with open_store(tmp_path, on_fatal=fatal) as store:
        cramped = store._writer._connection = Cramped(store._writer._connection, 1 << 30)
        store.on_full(make_room)
        unknown = store.submit(lambda c: set_meta(c, "lost", "1"))
        ended = await asyncio.to_thread(died.wait, SOON_S / 4)
        cramped.left = 0  # so that the writer ends, whatever it did
        assert ended, "it waits for ever"
        assert len(rooms) == 4 + 3
        assert [getattr(end, "sqlite_errorcode", 0) for end in ends] == [sqlite3.SQLITE_FULL]
        await asyncio.sleep(0.05)
        assert not unknown.done(), "what is unknown is not answered"
        cramped.inner.close()


async def test_room_that_comes_while_the_writer_stops_is_no_end(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writer_module, "FULL_RETRY_S", 0.01)
    async with open_store(tmp_path) as store:
        writer, go_on = store._writer, threading.Event()
        cramped = writer._connection = Cramped(writer._connection, 3)
        refused = store.submit(lambda c: go_on.wait(SOON_S))
        stopping = asyncio.create_task(asyncio.to_thread(writer.stop))
        await asyncio.sleep(0.1)  # the stop is there before the first COMMIT
        go_on.set()
        await stopping
        assert cramped.left == 0
        with pytest.raises(writer_module.StoreFull):
            await asyncio.wait_for(refused, SOON_S)


async def test_what_says_that_nothing_more_can_be_written() -> None:
    assert all(is_full(OSError(number, "")) for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS))
    assert not is_full(OSError(errno.EIO, "")) and not is_full(ValueError())


async def test_a_reserve_that_is_not_there_cannot_be_given_up_twice(tmp_path: Path) -> None:
    (tmp_path / RESERVE).touch()
    give_up(tmp_path)
    give_up(tmp_path)
    assert not (tmp_path / RESERVE).exists()

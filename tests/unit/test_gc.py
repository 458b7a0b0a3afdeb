"""gc: what has had its time goes, what anything refers to stays, and a row never points to a missing file."""

from __future__ import annotations

import asyncio
import os
import sqlite3
from contextlib import closing

import pytest

from artd.api.requests import Requests
from artd.check.run import check
from artd.config import Retention
from artd.errors import NotFound, RequestError
from artd.retention import collector
from artd.retention.clock_jumps import stop_retention
from artd.retention.collector import EXPIRIES, REFERENCES, Collector
from artd.rollouts.insert import insert_many
from artd.store.blobs import GRACE_S, TRASH, Blobs, add_row
from artd.store.store import emit
from artd_schema.data.trajectory import ExchangeRef
from artd_schema.wire import client_api as api
from tests.fakes.rows import FakeClock, add_run, body, count, data_dir, make_ingest, one, open_store, submit, turn
from tests.fakes.world import World, copy

pytestmark = pytest.mark.asyncio
DAY_S = 86_400.0
FOR_EVER = Retention(trajectories_days=0, batches_days=0, exchanges_days=0)


class Place:
    """A store, its blobs and a collector that see one clock."""

    def __init__(self, store, root, clock, retention=FOR_EVER):
        self.store, self.data, self.clock = store, data_dir(root), clock
        self.blobs = Blobs(self.data.blobs, clock.monotonic)
        self.collector = Collector(store, self.blobs, retention)

    async def collect(self, **how):
        return {(row["what"], row["kind"]): row["count"] for row in (await self.collector.collect(**how)).rows()}

    async def row(self, sha, kind="trajectory"):
        await self.store.write(lambda c: add_row(c, sha, 1, kind, 0))

    def trash(self):
        return {path.name for path in self.data.blobs.glob(f"{TRASH}/*")}


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def folder(tmp_path):
    """A folder with something of everything in it."""
    return copy(tmp_path / "w")


async def test_every_column_that_names_a_blob_is_looked_at(tmp_path):
    async with open_store(tmp_path) as store:
        tables = [row["name"] for row in await store.read("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        keys = [
            f"{table}.{row['from']}" for table in tables
            for row in await store.read(f"SELECT * FROM pragma_foreign_key_list('{table}')") if row["table"] == "blob"
        ]  # fmt: skip
        assert sorted(keys) == sorted(REFERENCES)


async def test_row_first_then_file_then_the_trash_at_a_later_pass(tmp_path, clock, monkeypatch):
    seen: list[str] = []
    async with open_store(tmp_path, clock) as store:
        place = Place(store, tmp_path, clock)
        sha = place.blobs.put(b"x")
        await place.row(sha)
        clock.advance(GRACE_S)

        def rename(source, target):
            with closing(sqlite3.connect(f"file:{store.path}?mode=ro", uri=True)) as c:  # what is committed
                seen.append(f"rename, {c.execute('SELECT count(*) FROM blob').fetchone()[0]} rows")
            real(source, target)

        real = os.rename
        monkeypatch.setattr("artd.store.blobs.os.rename", rename)
        assert await place.collect(dry=True) == {("trashed", "trajectory"): 1}
        assert await count(store, "blob") == 1 and place.blobs.path(sha).exists()
        assert await place.collect() == {("trashed", "trajectory"): 1}
        assert seen == ["rename, 0 rows"] and place.trash() == {sha} and not place.blobs.path(sha).exists()
        assert await place.collect() == {("freed", "file"): 1}
        assert place.trash() == set() and await place.collect() == {}


async def test_what_is_being_put_is_left_alone_until_its_row_can_not_come_any_more(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        place = Place(store, tmp_path, clock)
        sha = place.blobs.put(b"x")
        temporary = place.blobs.path("a" * 64).with_name(f".{'a' * 64}.999999-0.tmp")
        temporary.parent.mkdir(exist_ok=True)
        temporary.write_bytes(b"of a dead writer")
        os.utime(temporary, (1.0, 1.0))
        clock.advance(GRACE_S - 1)
        assert await place.collect() == {("trashed", "no row"): 1} and place.trash() == {temporary.name}
        clock.advance(1)
        assert await place.collect() == {("freed", "file"): 1, ("trashed", "no row"): 1}
        assert place.trash() == {sha}


@pytest.mark.parametrize("known", [True, False], ids=["known", "forgotten"])
async def test_a_put_between_any_two_steps_keeps_its_file(tmp_path, clock, monkeypatch, known):
    """The same content comes again at every moment of a pass, and its row at every later one; also when the put has been
    forgotten by then, as after ten minutes."""
    moments = ("drop", "dropped", "trash", "trashed")
    for put in range(len(moments)):
        for insert in range(put, len(moments) + 1):
            root = tmp_path / f"{put}{insert}"
            root.mkdir()
            async with open_store(root, clock) as store:
                place = Place(store, root, clock)
                sha = place.blobs.put(b"x")
                await place.row(sha)
                await add_run(store)
                clock.advance(GRACE_S)

                left = [0, 1, 2, 3, 4]
                if not known:
                    monkeypatch.setattr(place.blobs, "being_put", lambda name: False)

                async def at(moment, place=place, store=store, put=put, insert=insert, sha=sha, left=left):
                    if moment not in left:
                        return  # the second pass
                    left.remove(moment)
                    if moment == put:
                        await asyncio.to_thread(place.blobs.put, b"x")
                    while moment == insert and not await store.write(lambda c: use(c, place.blobs, sha)):
                        assert not known
                        await asyncio.to_thread(place.blobs.put, b"x")  # its file went: it is sent again

                drop, trash = place.collector._drop_rows, place.collector._trash

                async def dropped(at=at, drop=drop):
                    await at(0)
                    kinds = await drop()
                    await at(1)
                    return kinds

                async def trashed(kinds, done, at=at, trash=trash):
                    await at(2)
                    await trash(kinds, done)
                    await at(3)

                monkeypatch.setattr(place.collector, "_drop_rows", dropped)
                monkeypatch.setattr(place.collector, "_trash", trashed)
                await place.collector.collect()
                await at(4)
                await place.collector.collect()
                assert await count(store, "blob") == 1 and place.blobs.path(sha).read_bytes() == b"x", (put, insert)


def use(c, blobs, sha):
    """A row that refers to a blob, inserted as everybody does: after a look for the file, which may have gone."""
    if blobs.missing([sha]):
        return False
    add_row(c, sha, 1, "exchange", 0)
    c.execute(
        "INSERT INTO exchange (run_id, response_id, choice, model, split, blob, created) VALUES (1, 'x', 0, '', 'train', ?, 0)",
        (sha,),
    )
    return True


async def test_a_file_that_went_before_its_row_came_is_noticed(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        ingest = make_ingest(store, data, max_inline=1)
        op, run = api.Submit(run="r", group="g", reward=1.0, key="k"), await ingest.facts("r")
        parcel = ingest._to_files(ingest._check(op, run, body()))
        parcel.files[0].unlink()
        (outcome,) = await store.write(lambda c: insert_many(c, 0, [parcel]))
        assert isinstance(outcome, RequestError) and outcome.code == "busy"
        assert await count(store, "blob") == await count(store, "trajectory_group") == 0
        assert not (await submit(ingest, key="k")).duplicate


# ---- a whole folder -------------------------------------------------------------------------------------------------


def kinds(root):
    """Blobs by kind."""
    with closing(sqlite3.connect(f"file:{root / 'artd.db'}?mode=ro", uri=True)) as c:
        return dict(c.execute("SELECT kind, count(*) FROM blob GROUP BY kind").fetchall())


async def test_nothing_of_a_living_folder_is_collected(folder, clock):
    before = kinds(folder)
    async with open_store(folder, clock) as store:
        place = Place(store, folder, clock)
        assert await place.collect() == {} and set(before) == {"trajectory", "batch", "manifest", "replay", "exchange"}
        await store.write(lambda c: c.execute("DELETE FROM exchange WHERE response_id = 'large'").rowcount)
        assert await place.collect() == {("trashed", "exchange"): 1}
        assert kinds(folder) == {kind: number for kind, number in before.items() if kind != "exchange"}
    assert check(folder, deep=True).clean


async def test_contents_go_with_age_and_rows_stay(folder, clock):
    async with open_store(folder, clock) as store:
        place = Place(store, folder, clock, Retention(trajectories_days=30, batches_days=10, exchanges_days=5))
        rows = {table: await count(store, table) for table in ("trajectory", "batch", "exchange")}
        unused = await count(store, "exchange", "trajectory_id IS NULL")
        sealed = "group_id = (SELECT max(id) FROM trajectory_group WHERE state = 'sealed' AND split = 'train')"
        # Dropped from a batch that was cancelled: its group is packed again, and needs it.
        dropped = f"id = (SELECT max(id) FROM trajectory WHERE {sealed})"
        await store.write(lambda c: c.execute(f"UPDATE trajectory SET state = 'discarded' WHERE {dropped}").rowcount)
        final = await count(store, "trajectory", f"state IN ('trained', 'discarded') AND NOT ({dropped})")
        clock.advance(4.9 * DAY_S)
        assert await place.collect(dry=True) == await place.collect() == {}
        clock.advance(0.2 * DAY_S)
        assert (await place.collect())["expired", "exchange"] == unused == 4
        assert await count(store, "exchange") == rows["exchange"] - unused
        clock.advance(5 * DAY_S)
        # The batch of a retired step, and the abandoned one; not those whose checkpoints are kept, nor the packed one.
        assert (await place.collect())["expired", "batch"] == await count(store, "batch", "payload = 'expired'")
        replayable = (
            "id IN (SELECT j.batch_id FROM job j JOIN checkpoint k ON k.job_id = j.id WHERE k.state = 'committed')"
        )
        assert await count(store, "batch", f"(payload = 'kept') <> (state = 'packed' OR {replayable})") == 0
        assert await count(store, "batch", replayable) > 0
        assert await count(store, "batch", "payload = 'expired' AND state = 'abandoned'") == 1
        clock.advance(20 * DAY_S)
        done = await place.collect()
        assert (
            done["expired", "trajectory"] == final and await count(store, "trajectory", "payload = 'expired'") == final
        )
        assert await count(store, "trajectory", "payload = 'expired' AND state NOT IN ('trained', 'discarded')") == 0
        assert await count(store, "trajectory", f"payload = 'kept' AND {dropped}") == 1
        assert {table: await count(store, table) for table in ("trajectory", "batch")} == {
            table: rows[table] for table in ("trajectory", "batch")
        }
        await place.collect()
        await place.collect()
        names = {name for folder in place.blobs.folders() for name, _, _ in place.blobs.files(folder)}
        assert len(names) == await count(store, "blob") and place.trash() == set()
        assert {expiry.kind for expiry in EXPIRIES} == {"trajectory", "batch", "rollout", "exchange", "event"}
    assert check(folder, deep=True).clean


async def test_old_events_go_and_their_numbers_are_not_used_again(folder, clock, monkeypatch):
    monkeypatch.setattr(collector, "ROWS", 3)
    async with open_store(folder, clock) as store:
        place = Place(store, folder, clock, Retention(trajectories_days=0, batches_days=0, exchanges_days=0))
        old = await count(store, "event")
        clock.advance(89 * DAY_S)
        await store.write(lambda c: emit(c, store.clock.now_ms(), "", "young", ""))
        newest = await one(store, "SELECT max(id) FROM event")
        assert await place.collect(dry=True) == await place.collect() == {}
        clock.advance(2 * DAY_S)
        assert await place.collect(dry=True) == {("expired", "event"): old}
        assert await place.collect() == {("expired", "event"): old} and old > 2 * collector.ROWS
        kinds = [row["kind"] for row in await store.read("SELECT kind FROM event ORDER BY id")]
        assert kinds == ["young", *["event.expired"] * -(-old // collector.ROWS)]
        assert await one(store, "SELECT min(id) FROM event") == newest
    assert check(folder, deep=True).clean


async def test_a_response_that_expired_can_not_be_referred_to(folder, clock):
    async with open_store(folder, clock) as store:
        place = Place(store, folder, clock, Retention(exchanges_days=1))
        world = World(store, place.data)
        world.name = "r"
        clock.advance(2 * DAY_S)
        await place.collect()
        with pytest.raises(NotFound, match="has expired"):
            await world.ingest.submit(
                api.Submit(run="r", group="late", reward=1.0, refs=(ExchangeRef("unused", 0),)), []
            )


async def test_one_that_expires_between_read_and_insert_is_not_found(folder, clock):
    async with open_store(folder, clock) as store:
        world = World(store, data_dir(folder))
        submitted = asyncio.ensure_future(world.ingest.submit(
            api.Submit(run="r", group="late", reward=1.0, refs=(ExchangeRef("unused", 0),)), []
        ))  # fmt: skip
        real = store.write

        async def write(fn):
            await real(lambda c: c.execute("DELETE FROM exchange WHERE response_id = 'unused'").rowcount)
            return await real(fn)

        store.write = write
        with pytest.raises(NotFound, match="has expired"):
            await submitted


async def test_nothing_goes_by_age_while_retention_has_stopped(folder, clock):
    async with open_store(folder, clock) as store:
        place = Place(store, folder, clock, Retention())
        clock.advance(400 * DAY_S)
        await store.write(lambda c: stop_retention(c, 0, "the clock jumped"))
        done = await place.collector.collect()
        assert done.rows() == [] and done.stopped == "the clock jumped"
        assert (await place.collector.collect(dry=True, resume=True)).stopped
        place.collector._jumped = lambda: True
        assert (await place.collector.collect(resume=True)).rows() == []
        place.collector._jumped = lambda: False
        assert {row["kind"] for row in (await place.collector.collect()).rows() if row["what"] == "expired"} == {
            "trajectory", "batch", "rollout", "exchange", "event"
        }  # fmt: skip


async def test_the_database_gives_its_free_pages_back_in_small_steps(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(collector, "VACUUM_PAGES", 10)
    async with open_store(tmp_path, clock) as store:
        place = Place(store, tmp_path, clock)
        await add_run(store)
        ingest = make_ingest(store, place.data)
        await submit(ingest, key="k", turns=(turn(raw=b"x" * 60_000),))
        await submit(ingest, key="l", turns=(turn(raw=b"x" * 60_000),))
        pages = await one(store, "PRAGMA page_count")
        await store.write(
            lambda c: c.execute("UPDATE trajectory SET payload = 'expired', state = 'discarded'").rowcount
        )
        await store.write(lambda c: c.execute("UPDATE trajectory_data SET body = NULL").rowcount)
        assert await one(store, "PRAGMA freelist_count") > 20
        await place.collect()
        assert await one(store, "PRAGMA freelist_count") == 0 and await one(store, "PRAGMA page_count") < pages - 20


async def test_a_client_can_ask_for_a_pass(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        place = Place(store, tmp_path, clock)
        place.blobs.put(b"x")
        clock.advance(GRACE_S)
        desk = Requests(store, None, None, None, None, None, "inst", 1, collector=place.collector)
        rows = [{"what": "trashed", "kind": "no row", "count": 1, "bytes": 1}]
        assert await desk.serve(api.Collect(dry=True), []) == api.Collected(rows=rows)
        assert place.trash() == set()
        assert await desk.serve(api.Collect(), []) == api.Collected(rows=rows)
        assert len(place.trash()) == 1

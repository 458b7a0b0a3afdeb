"""fleet: what is keyed by run and worker works for two of each. The rules that allow one (`artd/core/fleet.py`) are lifted here."""

from __future__ import annotations

import asyncio

import pytest

from artd.packing import child, service
from artd.retention.checkpoints import CheckpointRetention
from artd.runs import lifecycle
from artd.runs.lifecycle import set_run_state
from artd.store.blobs import Blobs
from artd_schema import client_api as api
from tests.awake import SOON_S
from tests.fakes.rows import add_run, body, data_dir, make_ingest, one, open_store, settle, turn
from tests.fakes.steps import commit_next, room, serve, train_next

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def lifted(monkeypatch):
    monkeypatch.setattr(lifecycle, "admission_error", lambda unfinished: "")


async def fill(store, data, run):
    """A sealed group of the run."""
    ingest = make_ingest(store, data)
    for number in range(2):
        key = f"{run}-{number}"
        op = api.Submit(run=run, group="g", reward=float(number), key=key)
        await ingest.submit(op, [body(turn(raw=key.encode()))])


async def test_a_run_whose_batch_fails_does_not_hold_up_another(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        for name in ("a", "b"):
            await add_run(store, name)
            await store.write(lambda c: c.execute("UPDATE run SET step = 0").rowcount)
            await store.write(lambda c: c.execute("UPDATE job SET state = 'cancelled', ended = 1").rowcount)
            await fill(store, data, name)

        async def pack(request, stall_s=0.0):
            return service.PackFailure(error="not today") if request.run == "a" else child.run(request)

        monkeypatch.setattr(service, "run_child", pack)
        monkeypatch.setattr(service.failures, "RETRY_S", (3600.0,))
        packing = asyncio.ensure_future(service.Packer(store, Blobs(data.blobs), data, room).run())
        async with asyncio.timeout(SOON_S):
            while not await store.read("SELECT 1 FROM batch"):
                await asyncio.sleep(0.01)
        assert await one(store, "SELECT r.name FROM batch b JOIN run r ON r.id = b.run_id") == "b"
        assert [row["packing"] is None for row in await store.read("SELECT packing FROM run ORDER BY id")] == [
            False,
            True,
        ]
        await settle(packing)


async def test_a_finished_run_is_looked_at_until_nothing_holds_its_checkpoints(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, keep_checkpoints=1)
        await commit_next(store, data)
        await serve(store, 1, data)
        await train_next(store, data)
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        retain = CheckpointRetention(store, data)
        kept = "SELECT group_concat(step) FROM checkpoint WHERE state = 'committed'"
        for _ in range(2):
            await store.write(retain._retire)
            assert await one(store, kept) == "0,1", "step 0 is served"
        await store.write(lambda c: c.execute("UPDATE push SET state = 'superseded', ended = 1").rowcount)
        await store.write(lambda c: c.execute("UPDATE serving SET state = 'gone'").rowcount)
        await store.write(retain._retire)
        assert await one(store, kept) == "1"
        for expected in (True, False):
            asked: list[str] = []
            store._writer._connection.set_trace_callback(asked.append)
            await store.write(retain._retire)
            store._writer._connection.set_trace_callback(None)
            assert any("FROM checkpoint" in sql for sql in asked) == expected

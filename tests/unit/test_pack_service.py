"""packing.service on a real store with the real child: what is due, what is committed, what is left out."""

from __future__ import annotations

import pytest

from artd.packing.service import Packer
from artd.requests import set_run_state
from artd.store.blobs import Blobs
from artd_schema import client_api as api
from tests.fakes.rows import add_run, count, data_dir, floats, ids, make_ingest, one, open_store, submit, turn
from tests.fakes.steps import commit_next, pack

pytestmark = pytest.mark.asyncio


async def make(store, tmp_path, **changes):
    data = data_dir(tmp_path)
    await add_run(store, **changes)
    await commit_next(store, data)
    return data, make_ingest(store, data), Packer(store, Blobs(data.blobs), data)


async def group(ingest, name, **changes):
    for number in range(2):
        await submit(ingest, group=name, key=f"{name}-{number}", reward=float(number), **changes)


def long_turn(tokens=70):
    """More than one row of 64 tokens."""
    return turn(token_ids=ids(*[3] * tokens), logprobs=floats(*[-0.5] * tokens))


async def test_batch_job_and_states_are_one_transaction(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path)
        await group(ingest, "g")
        assert await pack(store, data)
        (batch,) = await store.read("SELECT * FROM batch")
        (job,) = await store.read("SELECT * FROM job WHERE kind = 'train'")
        assert (job["batch_id"], job["step"], job["epoch"], job["state"]) == (batch["id"], 1, 1, "queued")
        assert await one(store, "SELECT next_epoch FROM run") == 2
        for sha in (batch["tensors"], batch["manifest"]):
            assert Blobs(data.blobs).path(sha).is_file() and await count(store, "blob", f"sha = '{sha}'") == 1
        assert await count(store, "trajectory", "state = 'packed'") == 2
        assert await one(store, "SELECT state FROM trajectory_group") == "packed"
        assert not list(data.tmp.iterdir()) and not await pack(store, data)  # one train job at a time


async def test_a_flush_of_a_paused_run_waits_for_its_resume(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, packer = await make(store, tmp_path, groups_per_step=3)
        await group(ingest, "g")
        await ingest.flush(api.Flush(run="r"))
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", "x"))
        assert (await store.write(packer._due))[0] is None and await one(store, "SELECT flush FROM run") == 1
        await store.write(lambda c: set_run_state(c, 0, 1, "active", ""))
        assert await pack(store, data)
        assert await one(store, "SELECT flush FROM run") == 0


async def test_a_flush_of_nothing_ends(tmp_path):
    async with open_store(tmp_path) as store:
        _, ingest, packer = await make(store, tmp_path)
        await ingest.flush(api.Flush(run="r"))
        assert (await store.write(packer._due))[0] is None and await one(store, "SELECT flush FROM run") == 0


async def test_what_cannot_be_packed_is_discarded_with_its_reason(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path, groups_per_step=2)
        await group(ingest, "short")
        for number in range(2):
            await submit(ingest, group="long", key=f"l{number}", reward=float(number), turns=(long_turn(70 + number),))
        assert await pack(store, data)
        states = await store.read("SELECT name, state, reason FROM trajectory_group ORDER BY id")
        assert [(row["name"], row["state"]) for row in states] == [("short", "packed"), ("long", "discarded")]
        assert "no trajectory could be packed" in states[1]["reason"]
        reasons = await store.read("SELECT reason FROM trajectory WHERE state = 'discarded'")
        assert len(reasons) == 2 and all("more than row_length 64" in row["reason"] for row in reasons)
        await commit_next(store, data)
        assert await count(store, "trajectory_group", "state = 'trained'") == 1


async def test_a_batch_of_nothing_discards_its_groups_and_goes_on(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, packer = await make(store, tmp_path)
        for number in range(2):
            await submit(ingest, group="long", key=f"l{number}", reward=float(number), turns=(long_turn(70 + number),))
        request, groups = await store.write(packer._due)
        assert await packer._pack(request, groups)  # trying again at once makes sense
        assert await one(store, "SELECT state FROM trajectory_group") == "discarded"
        assert await count(store, "batch") == 0 and not await pack(store, data)


async def test_a_run_that_moved_on_while_it_was_packed_gets_no_batch(tmp_path):
    async with open_store(tmp_path) as store:
        _, ingest, packer = await make(store, tmp_path)
        await group(ingest, "g")
        request, groups = await store.write(packer._due)
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", "x"))
        await packer._pack(request, groups)
        assert await count(store, "batch") == 0 and await count(store, "trajectory", "state = 'queued'") == 2

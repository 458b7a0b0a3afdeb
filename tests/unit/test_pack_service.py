"""packing.service on a real store: what is due, what is committed, what is left out. Where nothing else is said the child's code
runs in this process; test_packing_child.py tests its own."""

from __future__ import annotations

import errno
from pathlib import Path

import msgspec
import pytest

from artd.api.job_orders import end_job
from artd.api.listing import read_rows
from artd.packing import service
from artd.packing.child import PackFailure, PackRequest
from artd.packing.process import run_child
from artd.packing.service import Packer
from artd.runs.lifecycle import set_run_state
from artd.store.blobs import Blobs
from artd_schema.codec import digest
from artd_schema.data.manifest import BatchManifest, ReplayManifest
from artd_schema.wire import client_api as api
from tests.fakes.rows import (
    MIXTURE,
    ROUTES,
    add_run,
    body,
    count,
    data_dir,
    floats,
    ids,
    make_ingest,
    one,
    open_store,
    submit,
    turn,
)
from tests.fakes.steps import claim, commit_next, pack, pack_here, room

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def pack_in_this_process(monkeypatch):
    monkeypatch.setattr(service, "run_child", pack_here)


async def make(store, tmp_path, **changes):
    data = data_dir(tmp_path)
    await add_run(store, **changes)
    await commit_next(store, data)
    return data, make_ingest(store, data), Packer(store, Blobs(data.blobs), data, room)


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
        assert await pack(store, data, run_child)
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
        assert await count(store, "trajectory", "reason LIKE '%more than row_length 64%'") == 2
        assert await count(store, "batch") == 0 and not await pack(store, data)


async def test_a_run_that_moved_on_while_it_was_packed_gets_no_batch(tmp_path):
    async with open_store(tmp_path) as store:
        _, ingest, packer = await make(store, tmp_path)
        await group(ingest, "g")
        request, groups = await store.write(packer._due)
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", "x"))
        await packer._pack(request, groups)
        assert await count(store, "batch") == 0 and await count(store, "trajectory", "state = 'queued'") == 2


def request(data, count=1):
    return PackRequest(
        run="r", step=1, seed=0, row_length=64, scale_rewards=False, base_digest="", db="", blobs_dir="",
        trajectory_ids=list(range(count)), out_dir=str(data.tmp / "pack"),
    )  # fmt: skip


async def test_a_packer_that_cannot_be_made_is_a_failure_like_any_other(tmp_path, monkeypatch):
    """Not the daemon's end: the machine has no process, memory or descriptor left, for a while."""

    def exhausted(*_, **__):
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr("artd.packing.process.subprocess.Popen", exhausted)
    answer = await run_child(request(data_dir(tmp_path)))
    assert isinstance(answer, PackFailure) and "no packer could be started" in answer.error


async def test_a_packer_that_dies_before_it_reads_a_large_request_is_a_failure_like_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr("artd.packing.process.guard_command", lambda *_: ["/bin/false"])
    answer = await run_child(request(data_dir(tmp_path), 200_000))
    assert isinstance(answer, PackFailure) and "status 1" in answer.error


# ---- expert replay --------------------------------------------------------------------------------------------------


def routed(raw=b"", **changes):
    """The turn of `rows.turn`, with the experts of its first three tokens."""
    return turn(raw=raw, routes=bytes([0, 1, 2, 3] * 3), **changes)


async def replayed(ingest, name):
    for number in range(2):
        key = f"{name}-{number}"
        await submit(ingest, group=name, key=key, reward=float(number), turns=(routed(key.encode()),))


async def test_the_replay_bundle_is_committed_with_its_batch_and_given_to_the_trainer(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path, base=MIXTURE)
        await replayed(ingest, "g")
        assert await pack(store, data, run_child)
        (batch,) = await store.read("SELECT * FROM batch")
        kinds = {"tensors": "batch", "manifest": "manifest", "replay": "replay", "replay_manifest": "manifest"}
        files = {column: Blobs(data.blobs).path(batch[column]).read_bytes() for column in kinds}
        for column, kind in kinds.items():
            assert digest(files[column]) == batch[column]
            assert await one(store, "SELECT kind FROM blob WHERE sha = ?", batch[column]) == kind
        manifest = msgspec.json.decode(files["manifest"], type=BatchManifest)
        told = msgspec.json.decode(files["replay_manifest"], type=ReplayManifest)
        assert manifest.replay == batch["replay_manifest"] and told.shape == ROUTES
        assert (told.covered, told.tokens) == (batch["covered"], batch["tokens"]) == (5, 7)
        packed = msgspec.json.decode(await one(store, "SELECT data FROM event WHERE kind = 'batch.packed'"))
        assert (packed["covered"], packed["physical_tokens"], packed["unshared_tokens"]) == (5, 7, 0)
        (row,) = (await read_rows(store, api.List(what="batches"))).rows
        assert (row["covered"], row["tokens"], row["replay"]) == (5, 7, batch["replay"])
        order = await claim(store, data)
        assert [Path(p).read_bytes() for p in (order.replay, order.replay_manifest)] == [
            files["replay"], files["replay_manifest"]
        ]  # fmt: skip


async def test_a_batch_without_replay_has_no_bundle(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path, base=MIXTURE, expert_replay=False)
        await group(ingest, "g")
        assert await pack(store, data)
        (batch,) = await store.read("SELECT * FROM batch")
        assert (batch["replay"], batch["replay_manifest"], batch["covered"]) == (None, None, None)
        order = await claim(store, data)
        assert (order.replay, order.replay_manifest) == ("", "")
        assert b"covered" not in await one(store, "SELECT data FROM event WHERE kind = 'batch.packed'")


async def test_a_trajectory_whose_routes_are_bad_fails_the_batch_by_name_and_loses_its_group(tmp_path):
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path, base=MIXTURE)
        await replayed(ingest, "bad")
        await replayed(ingest, "good")
        # Past ingest, which would have refused it.
        bad = body(msgspec.structs.replace(routed(), routes=bytes([0, 1, 2, 3] * 2)))

        def plant(c):
            c.execute("UPDATE trajectory SET digest = ? WHERE id = 2", (digest(bad),))
            c.execute("UPDATE trajectory_data SET body = ? WHERE trajectory_id = 2", (bad,))

        await store.write(plant)
        assert await pack(store, data)  # trying again at once makes sense
        assert await count(store, "batch") == 0
        event = msgspec.json.decode(await one(store, "SELECT data FROM event WHERE kind = 'batch.failed'"))
        assert (event["trajectory"], event["position"]) == (2, "turns[0].routes")
        rows = await store.read("SELECT name, state, reason FROM trajectory_group ORDER BY id")
        assert [(row["name"], row["state"]) for row in rows] == [("bad", "discarded"), ("good", "sealed")]
        assert "trajectory 2: turns[0].routes: has 2 rows from token 0 of 4" in rows[0]["reason"]
        assert await pack(store, data) and await count(store, "batch") == 1


async def test_a_bundle_that_the_disk_changed_is_not_committed(tmp_path, monkeypatch):
    async with open_store(tmp_path) as store:
        _, ingest, packer = await make(store, tmp_path, base=MIXTURE)
        await replayed(ingest, "g")
        real = Blobs.adopt

        def adopt(self, source):
            if source.name == "replay.safetensors":
                source.write_bytes(source.read_bytes()[:-1] + b"\7")
            return real(self, source)

        monkeypatch.setattr(Blobs, "adopt", adopt)
        request, groups = await store.write(packer._due)
        assert not await packer._pack(request, groups)
        assert b"other bytes than it was given" in await one(store, "SELECT packing FROM run")
        assert await count(store, "batch") == 0 and await count(store, "trajectory", "state = 'queued'") == 2


async def test_the_bundle_stays_as_long_as_its_batch_s_tensors(tmp_path):
    """Whatever becomes of the batch, trained or abandoned, no service takes one without the other."""
    async with open_store(tmp_path) as store:
        data, ingest, _ = await make(store, tmp_path, base=MIXTURE)
        await replayed(ingest, "g")
        assert await pack(store, data)
        await commit_next(store, data)
        (batch,) = await store.read("SELECT * FROM batch")
        assert batch["state"] == "trained"
        for column in ("tensors", "manifest", "replay", "replay_manifest"):
            assert Blobs(data.blobs).path(batch[column]).is_file()


async def test_a_group_of_which_one_was_dropped_is_packed_again_after_a_cancel(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, group_size=3)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        long = turn(token_ids=ids(*[3] * 80), logprobs=floats(*[-0.5] * 80))
        for key, reward, made in (("a", 0.0, turn()), ("b", 1.0, turn(raw=b"b")), ("c", 0.5, long)):
            await submit(ingest, group="g", key=key, reward=reward, turns=(made,))
        assert await pack(store, data)
        for _ in range(2):
            states = [row["state"] for row in await store.read("SELECT state FROM trajectory ORDER BY id")]
            assert states == ["packed", "packed", "discarded"]
            job = await one(store, "SELECT id FROM job WHERE state = 'queued'")
            await store.write(lambda c, job=job: end_job(c, 0, job, False))
            await store.write(lambda c: c.execute("UPDATE run SET state = 'active'").rowcount)
            assert await pack(store, data)

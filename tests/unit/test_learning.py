"""What a run learns with changes while it goes on: from which batch on, what a retry gets, what attaching compares, what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from artd.cli.read import REPLAYABLE, Database
from artd.cli.replay_job import inputs
from artd.errors import Conflict, Invalid, NotFound
from artd.packing import service
from artd.runs.lifecycle import Runs, set_run_state
from artd.store.blobs import Blobs
from artd_schema.data.manifest import MANIFEST_FILE, BatchManifest, CheckpointManifest
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from tests.fakes.rows import EVERY_STEP, add_run, make_ingest, one, open_store, submit
from tests.fakes.rows import spec as make_spec
from tests.fakes.steps import claim, commit_next, make_dispatch, pack, pack_here, packed_run, room, stage, staged

pytestmark = pytest.mark.asyncio
LR = "json_extract(learning, '$.optimizer.lr')"


def runs_of(store: Any) -> Runs:
    return Runs(store, lambda _: None, EVERY_STEP)


async def change(store: Any, request: str = "", **changes: Any) -> None:
    await runs_of(store).update(api.UpdateRun(run="r", changes=changes, request=request))


async def group(store: Any, data: Any, name: str) -> None:
    for number in range(2):
        await submit(make_ingest(store, data), group=name, key=f"{name}-{number}", reward=float(number))


async def test_a_change_counts_from_the_next_batch_on_and_a_job_keeps_its_own(tmp_path: Path) -> None:
    """The batch that waited for its trainer keeps the rate of its packing, in its retry too; both manifests say which."""
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path)
        await change(store, optimizer={"lr": 0.25})
        for fence in (1, 2):
            order = await claim(store, data)
            assert order.fence == fence and order.learning is not None
            assert order.learning.optimizer.lr == 1e-5 and order.learning.version == 0
            await store.write(
                lambda c: c.execute("UPDATE job SET state = 'queued', worker = NULL WHERE state = 'running'")
            )
        await commit_next(store, data)
        await group(store, data, "next")
        assert await pack(store, data)
        order = await claim(store, data)
        assert order.learning is not None
        assert (order.learning.optimizer.lr, order.learning.version) == (0.25, 1)
        batch = msgspec.json.decode(Path(order.manifest).read_bytes(), type=BatchManifest)
        assert batch.learning == order.learning
        assert await one(store, "SELECT count(*) FROM event WHERE kind = 'run.updated'") == 1


async def test_a_change_while_a_batch_is_packed_is_in_that_batch(tmp_path: Path) -> None:
    """What was acknowledged before the batch's transaction is in it: the batch is packed again."""
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path)
        await commit_next(store, data)
        await group(store, data, "next")

        async def slow(request: Any, stall_s: float) -> Any:
            await change(store, optimizer={"lr": 0.5})
            return await pack_here(request)

        packer = service.Packer(store, Blobs(data.blobs), data, room)
        request, groups = await store.write(packer._due)
        assert request is not None
        with mock.patch.object(service, "run_child", slow):
            await packer._pack(request, groups)
        assert await one(store, "SELECT count(*) FROM batch") == 1, "packed with settings that a client had replaced"
        assert await pack(store, data)
        assert await one(store, f"SELECT {LR} FROM job ORDER BY id DESC LIMIT 1") == 0.5


async def test_a_result_that_was_trained_with_other_values_is_no_step(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path)
        dispatch = make_dispatch(store, data)
        order = await claim(store, data, dispatch)
        assert order.learning is not None
        other = msgspec.structs.replace(order.learning, version=7)
        sha = stage(Path(order.dir), order, learning=other)
        await dispatch.take_staged("trainer-1", staged(order, sha))
        assert await one(store, "SELECT step FROM run") == 0
        assert "learning" in await one(store, "SELECT error FROM job WHERE kind = 'train'")


async def test_a_replay_has_the_values_of_the_job(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        data = await packed_run(store, tmp_path, optimizer=make_spec().optimizer)
        ref = await commit_next(store, data)
        await change(store, loss={"clip_high": 2.0})
    database = Database(tmp_path)
    (row,) = database.rows(REPLAYABLE, id=2, limit=1)
    with mock.patch.object(inputs, "committed_code", lambda *_: mock.Mock(loss=None, family=None)):
        request = inputs.request(database, tmp_path, row, tmp_path / "x")
    database.close()
    made = msgspec.json.decode((Path(ref.dir) / MANIFEST_FILE).read_bytes(), type=CheckpointManifest)
    assert request.run.learning == made.learning and request.run.learning is not None
    assert request.run.learning.loss.clip_high == 5.0


async def test_attaching_compares_with_the_spec_that_the_run_was_made_with(tmp_path: Path) -> None:
    """An old program neither conflicts with a change nor takes it back."""
    async with open_store(tmp_path) as store:
        await add_run(store)
        await change(store, optimizer={"lr": 0.5})
        runs = runs_of(store)
        info = await runs.create(api.CreateRun(name="r", spec=make_spec()))
        assert isinstance(info, api.RunInfo) and info.spec is not None and info.learning is not None
        assert (info.spec.optimizer.lr, info.learning.optimizer.lr) == (1e-5, 0.5)
        with pytest.raises(Conflict, match="`optimizer`|`optimizer.lr` differs"):
            await runs.create(api.CreateRun(name="r", spec=make_spec(optimizer=info.learning.optimizer)))


async def test_fields_that_are_not_named_stay_and_none_takes_one_back(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        await add_run(store)
        await change(
            store, optimizer={"lr": 0.5, "schedule": {"kind": "cosine", "steps": 9}}, loss={"kl": {"coef": 0.1}}
        )
        await change(store, loss={"kl": {"estimator": "k2"}, "clip_high": 3.0})
        info = await runs_of(store).info("r", False)
        assert info.learning is not None and info.learning.version == 2
        loss = msgspec.to_builtins(info.learning.loss)
        assert loss == {
            "kind": "cispo", "clip_high": 3.0, "normalise": "token", "kl": {"coef": 0.1, "estimator": "k2", "into": "loss"},
        }  # fmt: skip
        await change(store, optimizer={"schedule": None, "lr": None}, loss={"kl": None, "clip_high": None})
        info = await runs_of(store).info("r", False)
        assert info.learning == msgspec.structs.replace(make_spec().learning, version=3)
        event = "SELECT json_extract(data, '$.changes') FROM event WHERE kind = 'run.updated' ORDER BY id LIMIT 1"
        assert msgspec.json.decode(await one(store, event))["optimizer.lr"] == [1e-5, 0.5]


async def test_what_is_there_already_and_what_comes_again_change_nothing(tmp_path: Path) -> None:
    """A repeated request must not undo what somebody else set after it."""
    async with open_store(tmp_path) as store:
        await add_run(store)
        await change(store, "first", optimizer={"lr": 0.5})
        await change(store, "second", optimizer={"lr": 0.25})
        await change(store, "first", optimizer={"lr": 0.5})
        await change(store, optimizer={"lr": 0.25})
        assert await one(store, f"SELECT {LR} FROM run") == 0.25
        assert await one(store, "SELECT count(*) FROM event WHERE kind = 'run.updated'") == 2


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"lora": {"rank": 4}}, "lora", "stays as the run was made"),
        ({"loss": {"kind": "ppo"}}, "loss.kind", "stays as the run was made"),
        ({"optimizer": 3}, "optimizer", "such as optimizer.lr=1e-6"),
        ({"optimizer": {"lr": -1}}, "changes", "lr"),
        ({"optimizer": {"rate": 1}}, "changes", "rate"),
        ({"optimizer": {"lr": float("nan")}}, "changes", "lr"),
        ({"loss": {"clip_low": 0.1}}, "spec.loss.clip_low", "has no such bound"),
        ({"loss": {"params": {"x": 1.0}}}, "spec.loss.params", "has no parameter"),
        ({"optimizer": {"schedule": {"kind": "linear"}}}, "spec.optimizer.schedule.steps", "steps=200"),
    ],
)
async def test_what_may_not_change_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], field: str, says: str
) -> None:
    async with open_store(tmp_path) as store:
        await add_run(store)
        with pytest.raises(Invalid, match=says) as caught:
            await change(store, **changes)
        assert caught.value.field == field
        assert await one(store, "SELECT learning FROM run") is None


async def test_a_finished_run_and_one_that_is_not_there(tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        with pytest.raises(NotFound):
            await change(store, optimizer={"lr": 0.5})
        await add_run(store)
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        with pytest.raises(Conflict, match="finished"):
            await change(store, optimizer={"lr": 0.5})


async def test_a_spec_says_what_a_run_learns_with() -> None:
    spec = RunSpec(model="/m")
    assert (spec.learning.optimizer, spec.learning.loss, spec.learning.version) == (spec.optimizer, spec.loss, 0)

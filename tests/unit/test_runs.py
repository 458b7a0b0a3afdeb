"""runs on a real store: create, attach, states, and what `wait` answers."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path

import pytest

from artd.errors import Conflict, Invalid, NotFound, RequestError
from artd.packing.advantages import group_statistics
from artd.runs.lifecycle import Runs, set_run_state
from artd.tables import once, pauses
from artd_schema.run.spec import EngineSpec, LoraSpec, LossSpec, RunSpec, TrainerSpec
from artd_schema.wire import client_api as api
from tests.awake import SOON_S
from tests.fakes.rows import (
    EVERY_STEP,
    FakeClock,
    add_run,
    add_worker,
    count,
    data_dir,
    make_ingest,
    one,
    open_store,
    submit,
)
from tests.fakes.steps import commit_next, serve

pytestmark = pytest.mark.asyncio


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 50}))
    (folder / "a.safetensors").write_bytes(b"x")
    return str(folder)


def make_runs(store, routed=EVERY_STEP):
    """routed: what the gateway confirmed."""
    return Runs(store, lambda _: None, routed)


async def test_creating_a_run_queues_its_first_checkpoint(tmp_path, model):
    async with open_store(tmp_path) as store:
        info = await make_runs(store).create(api.CreateRun(name="r", spec=RunSpec(model=model)))
        assert info.created and (info.state, info.step, info.served) == ("active", -1, -1)
        (job,) = await store.read("SELECT * FROM job")
        assert (job["kind"], job["state"], job["step"], job["epoch"]) == ("init", "queued", 0, 0)
        assert await one(store, "SELECT vocab_size FROM run") == 50
        assert await one(store, "SELECT next_epoch FROM run") == 1


async def test_attaching_needs_the_same_spec_or_none(tmp_path, model):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        spec = RunSpec(model=model)
        await runs.create(api.CreateRun(name="r", spec=spec))
        for asked in (spec, None):
            assert not (await runs.create(api.CreateRun(name="r", spec=asked))).created
        other = RunSpec(model=model, optimizer=type(spec.optimizer)(lr=1.0))
        with pytest.raises(Conflict, match=r"`optimizer\.lr` differs") as caught:
            await runs.create(api.CreateRun(name="r", spec=other))
        assert caught.value.field == "optimizer.lr"
        assert await count(store, "job") == 1


async def test_two_clients_may_create_the_same_run_at_once(tmp_path, model):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        spec = RunSpec(model=model)
        infos = await asyncio.gather(*(runs.create(api.CreateRun(name="r", spec=spec)) for _ in range(5)))
        assert sorted(info.created for info in infos) == [False] * 4 + [True]
        other = RunSpec(model=model, seed=9)
        results = await asyncio.gather(
            *(runs.create(api.CreateRun(name="r", spec=s)) for s in (spec, other)), return_exceptions=True
        )
        assert isinstance(results[1], Conflict) and results[1].field == "seed"


async def test_what_cannot_be_created(tmp_path, model):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        for name in ("", "-a", "a/b", "a b", "x" * 65, "ä", "..", "r\n"):
            with pytest.raises(Invalid, match="run name") as caught:
                await runs.create(api.CreateRun(name=name, spec=RunSpec(model=model)))
            assert caught.value.field == "name"
        with pytest.raises(NotFound, match="no run 'r'"):
            await runs.create(api.CreateRun(name="r"))
        with pytest.raises(Invalid, match="no model folder"):
            await runs.create(api.CreateRun(name="r", spec=RunSpec(model="/nowhere")))
        assert await count(store, "run") == 0


async def test_drawn_weights_cannot_be_served_beneath_adapters(tmp_path, model):
    (Path(model) / "a.safetensors").rename(Path(model) / "seeded.json")
    async with open_store(tmp_path) as store:
        with pytest.raises(Invalid, match="are drawn") as caught:
            await make_runs(store).create(
                api.CreateRun(name="r", spec=RunSpec(model=model, rollout_weights_mode="lora"))
            )
        assert caught.value.field == "spec.rollout_weights_mode" and await count(store, "run") == 0
        assert (await make_runs(store).create(api.CreateRun(name="r", spec=RunSpec(model=model)))).created


@pytest.mark.parametrize(
    ("sizes", "parameters", "error"),
    [
        ({"tensor_parallel": 3, "expert_parallel": 2}, "lora", r"\(3\) and expert_parallel \(2\): one must divide the other"),
        ({"context_parallel": 3, "expert_parallel": 2}, "lora", "one must divide the other"),
        ({"pipeline_parallel": 2, "tensor_parallel": 2, "expert_parallel": 8}, "full", "each hold the whole model"),
        ({"tensor_parallel": 2, "context_parallel": 2, "expert_parallel": 2}, "lora", ""),
        ({"tensor_parallel": 2, "expert_parallel": 8, "pipeline_parallel": 3}, "lora", ""),
    ],
)  # fmt: skip
async def test_processes_that_do_not_fit_together_are_refused(tmp_path, model, sizes, parameters, error):
    spec = RunSpec(model=model, parameters=parameters, trainer=TrainerSpec(**sizes))
    async with open_store(tmp_path) as store:
        creating = make_runs(store).create(api.CreateRun(name="r", spec=spec))
        if not error:
            assert (await creating).created
            return
        with pytest.raises(Invalid, match=error) as caught:
            await creating
        assert caught.value.field == "spec.trainer" and await count(store, "run") == 0


async def test_groups_of_one_are_refused_as_nothing_could_ever_be_trained(tmp_path, model):
    """Neither the loss nor the scaling of rewards has a setting that learns from one reward alone."""
    for loss, scale in itertools.product(("token", "sequence"), (True, False)):
        spec = RunSpec(model=model, group_size=1, scale_rewards=scale, loss=LossSpec(normalise=loss))
        assert group_statistics([1.0], scale=scale).outcome == "single_trajectory"
        async with open_store(tmp_path) as store:
            with pytest.raises(Invalid, match="group_size=1 trains nothing.*use 2 or more") as caught:
                await make_runs(store).create(api.CreateRun(name="r", spec=spec))
            assert caught.value.field == "spec.group_size" and await count(store, "run") == 0
    async with open_store(tmp_path) as store:
        spec = RunSpec(model=model, group_size=2)
        assert (await make_runs(store).create(api.CreateRun(name="r", spec=spec))).created


async def test_an_engine_that_artd_does_not_have_is_refused(tmp_path, model):
    async with open_store(tmp_path) as store:
        spec = RunSpec(model=model, engine=EngineSpec(kind="abacus"))
        with pytest.raises(Invalid, match="engine.kind='abacus' is not an engine of this artd: use 'vllm'") as caught:
            await make_runs(store).create(api.CreateRun(name="r", spec=spec))
        assert caught.value.field == "spec.engine.kind" and await count(store, "run") == 0


async def test_an_adapter_that_no_engine_can_serve_is_refused(tmp_path, model):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        large = LoraSpec(rank=513)
        with pytest.raises(
            Invalid, match="of rank 512 at most: use a lower one, or rollout_weights_mode='merged'"
        ) as caught:
            await runs.create(
                api.CreateRun(name="r", spec=RunSpec(model=model, lora=large, rollout_weights_mode="lora"))
            )
        assert caught.value.field == "spec.lora.rank" and await count(store, "run") == 0
        assert (await runs.create(api.CreateRun(name="r", spec=RunSpec(model=model, lora=large)))).created


async def test_an_old_run_of_groups_of_one_can_still_be_attached_to(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=1)
        runs = make_runs(store)
        found = await runs.create(api.CreateRun(name="r"))
        assert not (await runs.create(api.CreateRun(name="r", spec=found.spec))).created


async def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path, model):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        await runs.create(api.CreateRun(name="first", spec=RunSpec(model=model)))
        with pytest.raises(Conflict, match="run 'first' is active") as caught:
            await runs.create(api.CreateRun(name="second", spec=RunSpec(model=model)))
        assert caught.value.field == "name"
        await runs.set_state("first", "paused", "x")
        with pytest.raises(Conflict):
            await runs.create(api.CreateRun(name="second", spec=RunSpec(model=model)))
        await runs.set_state("first", "finished")
        assert (await runs.create(api.CreateRun(name="second", spec=RunSpec(model=model)))).created


async def test_without_a_runtime_nothing_is_created(tmp_path, model):
    def missing(_kind: str):
        raise Conflict("artd runtime install megatron --cpu")

    async with open_store(tmp_path) as store:
        with pytest.raises(Conflict, match="runtime install"):
            await Runs(store, missing, EVERY_STEP).create(api.CreateRun(name="r", spec=RunSpec(model=model)))
        assert await count(store, "run") == 0


async def test_states(tmp_path):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        await add_run(store)
        await runs.set_state("r", "paused", "lunch")
        info = await runs.info("r", False)
        assert (info.state, info.reason) == ("paused", "lunch")
        await runs.set_state("r", "paused")  # asking twice is no error
        await runs.set_state("r", "active")
        assert (await runs.info("r", False)).reason == ""
        await runs.set_state("r", "finished")
        await runs.set_state("r", "finished")
        for state in ("active", "paused"):
            with pytest.raises(Conflict, match="finished"):
                await runs.set_state("r", state)
        with pytest.raises(NotFound):
            await runs.set_state("x", "paused")
        assert await count(store, "event", "kind IN ('run.paused', 'run.resumed', 'run.finished')") == 3


def wait(step, timeout_s=0.0):
    return api.WaitStep(run="r", step=step, timeout_s=timeout_s)


async def test_wait_answers_by_the_rows(tmp_path):
    async with open_store(tmp_path) as store:
        runs, data = make_runs(store), data_dir(tmp_path)
        ingest = make_ingest(store, data)
        with pytest.raises(NotFound):
            await runs.wait(wait(0))
        await add_run(store)
        assert await runs.wait(wait(0)) == api.Pending(step=-1, phase="init", doing="making the first checkpoint")
        await commit_next(store, data)
        assert await runs.wait(wait(0)) == api.Pending(step=0, phase="serve", doing="bringing step 0 into the engine")
        await serve(store)
        info = await runs.wait(wait(0))
        assert isinstance(info, api.StepInfo) and (info.step, info.metrics) == (0, {"loss": 0.5})
        assert await runs.wait(wait(1)) == api.Stalled(step=0, sealed=0, trainable=0, needed=1)
        await submit(ingest, key="a", reward=0.0)
        assert await runs.wait(wait(1)) == api.Pending(step=0, phase="collect", doing="waiting for groups of step 1")
        await submit(ingest, key="b", reward=1.0)
        assert isinstance(await runs.wait(wait(1)), api.Pending)  # a batch is due


async def test_wait_names_a_worker_that_nothing_starts_any_more(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        insert = "INSERT INTO process (name, kind, run_id, state, boot, error, since) VALUES (?, ?, 1, ?, 1, ?, 0)"
        for row in (
            ("engine-1-0", "engine", "backoff", "it died"),
            ("trainer-1", "trainer", "broken", "no CUDA device\nlast lines of its log"),
        ):
            await store.write(lambda c, row=row: c.execute(insert, row))
        assert (await make_runs(store).wait(wait(0))).problem == "trainer is broken: no CUDA device"
        bare = "ended with exit status 1\nTraceback\nRuntimeError: out of memory"
        await store.write(lambda c: c.execute("UPDATE process SET error = ? WHERE kind = 'trainer'", (bare,)))
        assert (await make_runs(store).wait(wait(0))).problem == "trainer is broken: RuntimeError: out of memory"


async def test_a_step_is_there_when_the_gateway_routes_it(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await serve(store)
        assert await make_runs(store, frozenset).wait(wait(0)) == api.Pending(
            step=0, phase="serve", doing="bringing step 0 into the engine"
        )
        assert isinstance(await make_runs(store, lambda: frozenset({"r@0"})).wait(wait(0)), api.StepInfo)


async def test_stalled_counts_what_there_is(tmp_path):
    async with open_store(tmp_path) as store:
        runs, data = make_runs(store), data_dir(tmp_path)
        ingest = make_ingest(store, data)
        await add_run(store, groups_per_step=3)
        await commit_next(store, data)
        await serve(store)
        for group in "gh":
            for reward in (0.0, 1.0):
                await submit(ingest, group=group, key=f"{group}{reward}", reward=reward)
        for key in "ab":
            await submit(ingest, group="flat", key=key, reward=0.5)
        assert await runs.wait(wait(1)) == api.Stalled(
            step=0, sealed=2, trainable=2, needed=3, discarded={"zero_variance": 1}
        )


async def test_wait_of_a_run_that_does_not_go_on_is_an_error(tmp_path):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        run = await add_run(store)
        await store.write(lambda c: set_run_state(c, 0, run, "paused", "job 7 is quarantined"))
        with pytest.raises(RequestError, match="run 'r' is paused: job 7 is quarantined; step 3 will not come"):
            await runs.wait(wait(3))


async def test_a_step_that_no_engine_will_get_is_not_waited_for(tmp_path):
    """Committed, but its run was finished meanwhile, or was paused because its push failed for good: nobody would ever answer."""
    async with open_store(tmp_path) as store:
        runs, data = make_runs(store), data_dir(tmp_path)
        run = await add_run(store)
        await commit_next(store, data)
        await store.write(lambda c: set_run_state(c, 0, run, "paused", ""))
        assert await runs.wait(wait(0)) == api.Pending(
            step=0, phase="serve", doing="bringing step 0 into the engine"
        ), "a paused run is still pushed"
        await store.write(lambda c: pauses.hold(c, 0, run, "push 1", "push 1 failed 5 times: canary"))
        with pytest.raises(RequestError, match="push 1 failed 5 times: canary; step 0 will not be served"):
            await runs.wait(wait(0))
        await runs.set_state("r", "active")
        assert await runs.wait(wait(0)) == api.Pending(step=0, phase="serve", doing="bringing step 0 into the engine")
        await runs.set_state("r", "finished")
        with pytest.raises(RequestError, match="run 'r' is finished; step 0 will not be served"):
            await runs.wait(wait(0))


async def test_a_paused_run_still_tells_of_a_step_that_is_served(tmp_path):
    async with open_store(tmp_path) as store:
        runs, data = make_runs(store), data_dir(tmp_path)
        run = await add_run(store)
        await commit_next(store, data)
        await serve(store)
        await store.write(lambda c: set_run_state(c, 0, run, "paused", ""))
        assert isinstance(await runs.wait(wait(0)), api.StepInfo)


async def test_wait_wakes_with_the_commit(tmp_path):
    async with open_store(tmp_path, FakeClock()) as store:
        runs, data = make_runs(store), data_dir(tmp_path)
        await add_run(store)
        await add_worker(store, "engine")
        waiting = asyncio.ensure_future(runs.wait(wait(0, timeout_s=30.0)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await commit_next(store, data)
        await serve(store)
        assert isinstance(await asyncio.wait_for(waiting, SOON_S), api.StepInfo)


async def test_a_second_run_is_told_what_it_waits_for_and_nothing_destructive(tmp_path, model):
    """The other run may be somebody else's, or only paused."""
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        await add_run(store, "theirs")
        await runs.set_state("theirs", "paused", "lunch")
        with pytest.raises(Conflict, match="run 'theirs' is paused at step -1") as caught:
            await runs.create(api.CreateRun(name="mine", spec=RunSpec(model=str(model))))
        assert "finish " not in str(caught.value)


async def test_a_request_that_comes_again_changes_nothing_again(tmp_path):
    """A client repeats what was not answered before a reconnect; what others did meanwhile stays."""
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        await add_run(store)
        await runs.set_state("r", "paused", "mine", "a")
        await runs.set_state("r", "active", request="b")
        await runs.set_state("r", "paused", "somebody else's", "c")
        await runs.set_state("r", "active", request="b")
        assert await one(store, "SELECT reason FROM run WHERE state = 'paused'") == "somebody else's"
        await runs.set_state("r", "active", request="d")
        await runs.set_state("r", "paused", "mine", "a")
        assert await one(store, "SELECT state FROM run") == "active"


async def test_a_refused_request_may_be_repeated(tmp_path):
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        with pytest.raises(NotFound):
            await runs.set_state("r", "paused", request="a")
        await add_run(store)
        await runs.set_state("r", "paused", request="a")
        assert await one(store, "SELECT state FROM run") == "paused"


async def test_requests_are_forgotten_after_many_others(tmp_path, monkeypatch):
    monkeypatch.setattr(once, "KEPT", 3)
    async with open_store(tmp_path) as store:
        for name in "abcdef":
            assert await store.write(lambda c, name=name: once.first_time(c, 0, name))
        assert await count(store, "request") == 3
        assert not await store.write(lambda c: once.first_time(c, 0, "f"))


async def test_rows_shorter_than_the_engines_answers_are_refused_unless_asked_for(tmp_path, model):
    """Long answers would be sampled, judged and never trained."""
    async with open_store(tmp_path) as store:
        runs = make_runs(store)
        engine = EngineSpec(max_model_len=4096)
        with pytest.raises(
            Invalid, match=r"row_length=1024 is less than engine.max_model_len=4096.*drop_longer=True"
        ) as caught:
            await runs.create(api.CreateRun(name="r", spec=RunSpec(model=model, row_length=1024, engine=engine)))
        assert caught.value.field == "spec.row_length" and await count(store, "run") == 0
        spec = RunSpec(model=model, row_length=1024, drop_longer=True, engine=engine)
        assert (await runs.create(api.CreateRun(name="r", spec=spec))).created and spec.row_tokens == 1024
        assert RunSpec(model=model, engine=engine).row_tokens == 4096
        assert RunSpec(model=model, row_length=8192, engine=engine).row_tokens == 8192


async def test_a_dense_model_has_no_experts_to_compute_again(tmp_path, model):
    async with open_store(tmp_path) as store:
        spec = RunSpec(model=model, trainer=TrainerSpec(recompute="selective"))
        with pytest.raises(Invalid, match="has none: use 'full', or 'none'") as caught:
            await make_runs(store).create(api.CreateRun(name="r", spec=spec))
        assert caught.value.field == "spec.trainer.recompute" and await count(store, "run") == 0


async def test_a_wait_tells_which_worker_starts_and_for_how_long(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        await add_worker(store, "engine", state="starting")
        assert isinstance(store.clock, FakeClock)
        store.clock.ms = 35_400
        assert (
            await make_runs(store).wait(api.WaitStep(run="r", step=0, timeout_s=0))
        ).doing == "engine starting, 35 s"

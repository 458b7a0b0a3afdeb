"""The client's interface: what each call asks the daemon for, and what it makes of the answer."""

from __future__ import annotations

import asyncio
import importlib.resources
import inspect
import subprocess
import sys
import threading
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

import artd_client
from artd_client import Client, ExchangeRef, RunSpec, Sampling, SyncClient, turn
from artd_client.connection import Connection
from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import Turn
from artd_schema.wire import client_api as api
from tests.fake_daemon import RUN, usual

ONE = turn([1, 2], [3], [-0.5])


def choices(*indices):
    return [SimpleNamespace(index=index) for index in indices]


@pytest.mark.asyncio
async def test_an_example_is_a_turn_that_nobody_sampled(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        await run.submit_example([1, 2], [3, 4], weights=[0, 1.5], key="k")
        await run.submit_example([1, 2], [3, 4])
        await run.submit_example([1, 2], [3, 4])
    first, *others = daemon.ops(api.Submit)
    assert (first.group, first.key, first.reward, first.credits[0].weights) == ("example-k", "k", 0.0, (0.0, 1.5))
    (bulk,) = [bulk for _, _, op, bulk in daemon.seen if op is first or op == first]
    (made,) = msgspec.msgpack.decode(bytes(bulk[0]), type=list[Turn])
    assert made.example and np.frombuffer(made.logprobs, "<f4").tolist() == [0.0, 0.0]
    assert others[0].key != others[1].key and others[0].group != others[1].group and not others[0].credits


# ---- runs ---------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_run_is_made_of_fields_or_of_a_spec_or_attached_to(daemon, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "toy").mkdir()
    async with Client(daemon.data) as art:
        run = await art.run("r", model="toy", group_size=4, lora={"rank": 2}, engine={"dtype": "bfloat16"})
        await art.run("r", model="./missing")
        await art.run("r", spec=RunSpec(model="/m"))
        await art.run("r")
    first, second, third, fourth = (op.spec for op in daemon.ops(api.CreateRun))
    assert (first.model, first.group_size, first.lora.rank, first.engine.dtype) == (
        str(tmp_path / "toy"), 4, 2, "bfloat16",
    )  # fmt: skip
    assert second.model == str(tmp_path / "missing") and third == RunSpec(model="/m") and fourth is None
    assert (run.name, run.model, run.state, run.step, run.served) == ("r", "r", "active", -1, -1)
    assert (run.base_url, run.api_key, run.spec) == (RUN.base_url, "secret", RUN.spec)
    assert repr(run) == "<Run 'r' active step -1 served -1>"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"model": "/m", "groupsize": 4}, "groupsize"),
        ({"model": "/m", "lora": {"rank": 0}}, "lora.rank"),
        ({"model": "/m", "rollout_weights_mode": "full"}, "rollout_weights_mode"),
        ({"group_size": 4}, "model"),
        ({"model": "/m", "spec": RunSpec(model="/m")}, "spec"),
    ],
)
async def test_a_bad_spec_is_refused_before_it_is_sent(daemon, arguments, field):
    async with Client(daemon.data) as art:
        with pytest.raises(artd_client.Invalid) as caught:
            await art.run("r", **arguments)
    assert caught.value.field == field and not daemon.seen


@pytest.mark.asyncio
async def test_a_run_of_a_large_model_may_take_longer_to_create(daemon, tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    with (tmp_path / "model" / "model.safetensors").open("wb") as file:
        file.truncate(1_000_000_000)  # takes no space
    waited, call = [], Connection.call

    async def noting(self, op, bulk, seconds):
        waited.append(seconds)
        return await call(self, op, bulk, seconds)

    monkeypatch.setattr(Connection, "call", noting)
    async with Client(daemon.data, timeout=3.0) as art:
        await art.run("r", model=tmp_path / "model")
        await art.run("r")
    assert waited == [13.0, 3.0]


def test_every_part_of_a_spec_can_be_imported():
    parts = [field.type for field in msgspec.structs.fields(RunSpec) if isinstance(field.type, type)]
    names = {part.__name__ for part in parts if issubclass(part, msgspec.Struct)}
    assert names <= set(artd_client.__all__) and "TrainerSpec" in names


@pytest.mark.asyncio
async def test_refresh_asks_again(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r", model="/m")
        daemon.handle = lambda op: msgspec.structs.replace(RUN, step=3, served=2, state="paused")
        assert (await run.refresh()) is run and (run.step, run.served, run.state) == (3, 2, "paused")
        assert daemon.ops(api.CreateRun)[-1].spec is None


# ---- trajectories -------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_responses_are_given_in_many_ways(daemon):
    completion = SimpleNamespace(id="x", choices=choices(0))
    many = SimpleNamespace(id="y", choices=choices(0, 1, 2))
    async with Client(daemon.data) as art:
        run = await art.run("r")
        await run.submit("g", 1, responses=[completion, ("y", 2), (many, many.choices[1]), "z", ExchangeRef("w", 3)])
        await run.submit("g", 1, responses=["z"], key="mine")
        with pytest.raises(artd_client.Invalid, match="3 choices; say which"):
            await run.submit("g", 1, responses=[many])
        for bad in [(1, 2), ("x", "1"), ("x", True), ("x", 1, 2), object(), ""]:
            with pytest.raises(artd_client.Invalid):
                await run.submit("g", 1, responses=[bad])
        for bad in [{}, {"responses": ["x"], "turns": [ONE]}]:
            with pytest.raises(artd_client.Invalid, match="either"):
                await run.submit("g", 1, **bad)
    first, second = daemon.ops(api.Submit)
    assert first.refs == tuple(ExchangeRef(i, c) for i, c in [("x", 0), ("y", 2), ("y", 1), ("z", 0), ("w", 3)])
    assert first.key == digest(to_json(first.refs)) and second.key == "mine"
    assert all(not bulk for _, _, op, bulk in daemon.seen)


@pytest.mark.asyncio
async def test_every_call_by_value_is_a_sample_of_its_own(daemon):
    """Equal bodies, in one task or several, in one client or two: nothing that was sampled twice is taken for one."""
    async with Client(daemon.data) as art, Client(daemon.data) as other:
        runs = [await art.run("r"), await art.run("r"), await other.run("r")]
        await asyncio.gather(*(run.submit("g", 1.0, turns=[ONE]) for run in runs for _ in range(3)))
        await runs[0].submit("g", 1.0, turns=[ONE], key="mine")
    *drawn, given = [op.key for op in daemon.ops(api.Submit)]
    assert len(set(drawn)) == 9 and all(drawn) and given == "mine"


@pytest.mark.asyncio
@pytest.mark.parametrize("arguments", [{"turns": [ONE]}, {"responses": ["x"]}, {"turns": [ONE], "key": "mine"}])
async def test_what_went_wrong_carries_the_key_that_repeats_it(daemon, arguments):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = lambda op: api.Error(code="failed", message="broken")
        with pytest.raises(artd_client.Failed) as caught:
            await run.submit("g", 1.0, **arguments)
        daemon.handle = usual
        await run.submit("g", 1.0, **(arguments | {"key": caught.value.key}))
        with pytest.raises(artd_client.Invalid) as other:
            await art.rows("cats")
    failed, again = daemon.ops(api.Submit)
    assert failed == again and failed.key and other.value.key == ""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("arguments", "field", "text"),
    [
        ({"group": 7, "turns": [ONE]}, "group", "7 is not a name"),
        ({"responses": "chat-1"}, "responses", "give a list"),
        ({"responses": SimpleNamespace(id="x", choices=[])}, "responses", "give a list"),
        ({"turns": ONE}, "turns", "give a list"),
        ({"turns": [ONE], "metadata": {"at": object()}}, "", "object is unsupported"),
        ({"turns": [ONE], "metadata": {"big": 2**64}}, "", "Submit: "),
    ],
)
async def test_what_is_easily_mistaken_is_refused_by_name(daemon, arguments, field, text):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        with pytest.raises(artd_client.Invalid, match=text) as caught:
            await run.submit(**({"group": "g", "reward": 1.0} | arguments))
        assert caught.value.field == field and not daemon.ops(api.Submit)
        await run.submit("g", np.float32(0.5), turns=[ONE], metrics={"a": np.float32(0.25), "n": 3})
    assert daemon.ops(api.Submit)[0].metrics == {"a": 0.25, "n": 3.0}


def test_a_turn_is_made_of_plain_lists_or_arrays():
    made = turn([1, 2**31 - 1], np.array([3, 4]), np.array([-0.5, -1.25], np.float32), temperature=0.7,
                policy_epoch=[(0, 3)], finish_reason="stop", response_id="x", choice=1, raw=b"{}")  # fmt: skip
    assert made == Turn(
        prompt_ids=np.array([1, 2**31 - 1], "<i4").tobytes(),
        token_ids=np.array([3, 4], "<i4").tobytes(),
        logprobs=np.array([-0.5, -1.25], "<f4").tobytes(),
        sampling=Sampling(temperature=0.7),
        policy_epoch=((0, 3),),
        finish_reason="stop",
        response_id="x",
        choice=1,
        raw=b"{}",
    )
    assert turn([1], [2], [-1.0], sampling=Sampling(temperature=2.0, seed=4)).sampling.seed == 4


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (([1], [2, 3], [-1.0]), "logprobs"),
        (([1, "2"], [2], [-1.0]), "prompt_ids[1]"),
        (([1], [2**31], [-1.0]), "token_ids[0]"),
        (([1], [1.5], [-1.0]), "token_ids[0]"),
        (([1], [2, 3], [-1.0, None]), "logprobs[1]"),
    ],
)
def test_a_bad_turn_names_the_place(arguments, field):
    with pytest.raises(artd_client.Invalid) as caught:
        turn(*arguments)
    assert caught.value.field == field and field in str(caught.value)


@pytest.mark.asyncio
async def test_groups_are_sealed_and_flushed(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        assert (await run.seal("g")).state == "sealed"
        await run.flush()
    assert [type(op).__name__ for _, _, op, _ in daemon.seen[1:]] == ["Seal", "Flush"]


# ---- waiting ------------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_waiting_asks_until_the_step_is_there(daemon):
    done = api.StepInfo(run="r", step=2, checkpoint="c", metrics={"loss": 1.0}, seconds={})
    answers = [api.Pending(step=1, phase="train"), api.Pending(step=1, phase="push"), done]
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = lambda op: answers.pop(0)
        assert await run.wait(2) == done
    assert [op.step for op in daemon.ops(api.WaitStep)] == [2, 2, 2]


@pytest.mark.asyncio
async def test_one_waiter_of_a_client_tells_what_is_waited_for(daemon, monkeypatch):
    """A line at once for each new activity, and the same again only after a while, however many wait."""
    told, answers = [], [api.Pending(step=0, phase="serve", doing=f"engine starting, {n} s") for n in (5, 10, 15, 20)]
    answers.append(api.Pending(step=0, phase="serve", doing="bringing step 0 into the engine"))
    done = api.StepInfo(run="r", step=0, checkpoint="c", metrics={}, seconds={})
    async with Client(daemon.data, progress=told.append) as art:
        run = await art.run("r")
        daemon.handle = lambda op: (answers.pop(0) if op.timeout_s <= 5.0 else answers[0]) if answers else done
        await asyncio.gather(*(run.wait(0) for _ in range(20)))
        assert told == ["engine starting, 5 s", "bringing step 0 into the engine"]
        monkeypatch.setattr("artd_client.progress.AGAIN_S", 0.0)
        answers += [api.Pending(step=0, phase="serve", doing=f"engine starting, {n} s") for n in (25, 30)]
        await run.wait(0)
        assert told[2:] == ["engine starting, 25 s", "engine starting, 30 s"]
    assert art.progress.waiter is None


@pytest.mark.asyncio
async def test_a_run_whose_model_is_fetched_is_asked_for_again(daemon):
    answers, told = (
        [api.Pending(step=-1, phase="fetch", doing=f"ORG/toy: fetching: {n} of 9 MB, {n} s") for n in (1, 2)],
        [],
    )
    async with Client(daemon.data, progress=told.append) as art:
        ready = daemon.handle
        daemon.handle = lambda op: answers.pop(0) if answers else ready(op)
        assert (await art.run("r", "ORG/toy")).name == "r"
    assert told == ["ORG/toy: fetching: 1 of 9 MB, 1 s"]
    assert [op.spec.model for op in daemon.ops(api.CreateRun)] == ["ORG/toy"] * 3


@pytest.mark.asyncio
async def test_waiting_ends_when_stalled_or_late(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        daemon.handle = lambda op: api.Stalled(step=4, sealed=3, trainable=1, needed=8)
        with pytest.raises(artd_client.Stalled, match="1 of 8 trainable groups") as caught:
            await run.wait(5)
        stalled = caught.value
        assert (stalled.step, stalled.sealed, stalled.trainable, stalled.needed) == (4, 3, 1, 8)
        daemon.handle = lambda op: api.Pending(step=4, phase="collect")
        with pytest.raises(artd_client.TimedOut, match="phase collect"):
            await run.wait(5, timeout=0.1)
        assert all(op.timeout_s <= 0.1 for op in daemon.ops(api.WaitStep)[1:])
        daemon.handle = lambda op: api.Error(code="failed", message="run 'r' is paused: disk full")
        with pytest.raises(artd_client.Failed, match="paused: disk full"):
            await run.wait(5, timeout=1)


# ---- looking and steering -------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_lists_and_events(daemon):
    def handle(op):
        match op:
            case api.List():
                return api.Rows(rows=[{"id": 1, "what": op.what, "run": op.run}])
            case api.Events():
                return api.Rows(rows=[{"id": op.after + 1}, {"id": op.after + 2}] if op.after < 8 else [])
        return usual(op)

    daemon.handle = handle
    async with Client(daemon.data) as art:
        run = await art.run("r")
        for what in ("trajectories", "groups", "batches", "jobs", "checkpoints", "pushes"):
            assert await getattr(run, what)(states=["queued"], limit=3) == [{"id": 1, "what": what, "run": "r"}]
            assert daemon.ops(api.List)[-1] == api.List(what=what, run="r", states=("queued",), limit=3)
        for what in ("runs", "jobs", "workers"):
            assert (await getattr(art, what)())[0] == {"id": 1, "what": what, "run": ""}
        with pytest.raises(artd_client.Invalid, match="unknown listing 'cats'"):
            await art.rows("cats")
        seen = []
        async for event in run.events(after=3):
            seen.append(event["id"])
            if len(seen) == 5:
                break
        assert seen == [4, 5, 6, 7, 8]
    assert [(op.run, op.after) for op in daemon.ops(api.Events)] == [("r", 3), ("r", 5), ("r", 7)]


@pytest.mark.asyncio
async def test_steering(daemon):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        await run.pause("lunch")
        await run.resume()
        await run.finish()
        await run.rollback(1)
        await art.cancel(3)
        await art.discard(3)
        await art.retry(4)
        await art.shutdown(drain_s=1.5)
    asked = [op for _, _, op, _ in daemon.seen[1:] if not isinstance(op, api.CreateRun)]
    drawn = [op.request for op in asked if isinstance(op, api.Order)]
    assert all(drawn) and len(set(drawn)) == len(drawn)
    assert [msgspec.structs.replace(op, request="") if isinstance(op, api.Order) else op for op in asked] == [
        api.Pause(run="r", reason="lunch"),
        api.Resume(run="r"),
        api.Finish(run="r"),
        api.Rollback(run="r", step=1, lineage=RUN.lineage),
        api.CancelJob(job=3),
        api.DiscardJob(job=3),
        api.RetryJob(job=4),
        api.Shutdown(drain_s=1.5),
    ]


@pytest.mark.asyncio
async def test_openai_is_bound_to_the_gateway_and_closed_with_the_client(daemon, monkeypatch):
    async with Client(daemon.data) as art:
        run = await art.run("r")
        made = run.openai(max_retries=7)
        assert (str(made.base_url), made.api_key, made.max_retries) == (RUN.base_url + "/", "secret", 7)
        assert not made.is_closed()
        monkeypatch.setitem(sys.modules, "openai", None)
        with pytest.raises(ImportError, match=r"pip install 'artd\[openai\]'"):
            run.openai()
    assert made.is_closed()


@pytest.mark.asyncio
async def test_each_openai_client_is_closed_whatever_becomes_of_the_others(daemon):
    async def breaks():
        raise OSError("it broke")

    art = await Client(daemon.data).__aenter__()
    run = await art.run("r")
    art.closing(breaks)
    made = run.openai()
    art.closing(breaks)
    with pytest.raises(OSError, match="it broke"):
        await art.close()
    assert made.is_closed()
    with pytest.raises(artd_client.Closed):
        await run.refresh()


# ---- without an event loop ------------------------------------------------------------------------------------------------


def test_the_sync_client_does_the_same(daemon):
    step = api.StepInfo(run="r", step=1, checkpoint="c", metrics={}, seconds={})

    def handle(op):
        match op:
            case api.WaitStep():
                return step
            case api.Events():
                return api.Rows(rows=[{"id": op.after + 1}])
        return usual(op)

    daemon.handle = handle
    with SyncClient(daemon.data) as art:
        assert art.daemon.version == "0"
        run = art.run("r", model="/m", group_size=2)
        assert run.submit("g", 1.0, turns=[ONE], key="k").trajectory == 1
        assert run.submit("g", 1.0, responses=["x"]).group_state == "open"
        assert run.seal("g").size == 8 and run.wait(1) == step
        run.flush(), run.pause(), run.resume(), run.finish(), run.refresh(), art.cancel(1), art.retry(1)
        assert art.runs() == art.jobs() == art.workers() == art.rows("jobs") == run.trajectories() == run.groups() == []
        assert run.batches() == run.jobs() == run.checkpoints() == run.pushes() == []
        events = run.events(after=6)
        assert [next(events)["id"], next(events)["id"]] == [7, 8]
        events.close()
        assert (run.name, run.model, run.state, run.base_url, run.api_key) == (
            "r",
            "r",
            "active",
            RUN.base_url,
            "secret",
        )
        made = run.openai()
        assert made.api_key == "secret"
        art.shutdown()
    assert made.is_closed()
    with pytest.raises(artd_client.Closed):
        art.runs()
    art.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "artd-client"]


@pytest.mark.parametrize(
    ("asynchronous", "blocking"),
    [
        (Client, SyncClient),
        (artd_client.Run, artd_client.SyncRun),
        (artd_client.Rollout, artd_client.SyncRollout),
        (artd_client.Group, artd_client.SyncGroup),
    ],
)
def test_the_sync_client_takes_the_same_arguments_and_returns_the_same(asynchronous, blocking):
    own_forms = {
        "AsyncGenerator[Row, None]": "Generator[Row, None, None]", "Run": "SyncRun", "AsyncOpenAI": "OpenAI",
        "Rollout": "SyncRollout", "AbstractAsyncContextManager[Group]": "Generator[SyncGroup, None, None]",
    }  # fmt: skip
    own = {"closing"}  # between Client and Run
    public = {name for name in dir(asynchronous) if not name.startswith("_")} - own
    assert public == {name for name in dir(blocking) if not name.startswith("_")} - {"info"}
    for name in public:
        one, other = (getattr(kind, name) for kind in (asynchronous, blocking))
        if callable(one):
            taken, given = (inspect.signature(call) for call in (one, other))
            assert [*taken.parameters.values()] == [*given.parameters.values()], name
            returned = taken.return_annotation
            assert given.return_annotation == own_forms.get(returned, returned), name


@pytest.mark.parametrize("package", ["artd", "artd_client", "artd_schema"])
def test_types_are_for_type_checkers_of_programs_too(package):
    assert (importlib.resources.files(package) / "py.typed").is_file()


def test_many_threads_may_share_a_sync_client(daemon):
    daemon.handle = lambda op: api.Rows(rows=[{"id": op.limit}])
    wrong = []
    with SyncClient(daemon.data) as art:

        def work(base):
            for number in range(base, base + 50):
                if art.rows("jobs", limit=number) != [{"id": number}]:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(1, 9)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not wrong and len(daemon.seen) == 400


def test_errors_come_through_the_sync_client_and_leave_no_thread(tmp_path):
    with pytest.raises(artd_client.DaemonNotRunning, match="artd start"), SyncClient(tmp_path / "none"):
        pass
    assert not [thread for thread in threading.enumerate() if thread.name == "artd-client"]


def test_an_interrupt_of_a_blocked_call_cancels_it(daemon, monkeypatch):
    import concurrent.futures

    daemon.handle = lambda op: None
    with SyncClient(daemon.data) as art:
        real = concurrent.futures.Future.result
        monkeypatch.setattr(
            concurrent.futures.Future, "result", lambda self, timeout=None: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            art.runs()
        monkeypatch.setattr(concurrent.futures.Future, "result", real)
        daemon.handle = usual
        assert art.jobs() == []
        assert not art._client._connection._calls


def test_importing_the_client_imports_nothing_of_the_daemon():
    program = "import sys, artd_client; print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    paths = [str(path) for path in sys.path if path]
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[:] = {paths!r}; {program}"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = set(done.stdout.split())
    assert {"artd_client", "artd_schema", "zmq", "msgspec"} <= loaded
    assert not loaded & {"artd", "artd_workers", "numpy", "anyio", "openai", "httpx", "safetensors", "aiosqlite"}

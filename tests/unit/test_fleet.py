"""fleet: what is keyed by run and worker works for two of each. The rule that allows one run (`artd/core/fleet.py`) is lifted here."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from artd.core.fleet import EngineHealth, may_serve, share_of
from artd.packing import child, service
from artd.retention.checkpoints import CheckpointRetention
from artd.runs import lifecycle
from artd.runs.lifecycle import set_run_state
from artd.serving.push_ends import DELAY_MS, MAX_ATTEMPTS
from artd.serving.pusher import LAG_S
from artd.serving.pusher import _engines as pusher_engines
from artd.serving.routing_table import Router, load_table
from artd.store.blobs import Blobs
from artd.store.pages import Page, read
from artd_schema.run.spec import EngineSpec
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import engine_name, trainer_name
from tests.awake import SOON_S, until
from tests.fakes.rows import (
    FakeClock,
    FakeWire,
    add_run,
    add_worker,
    body,
    data_dir,
    make_ingest,
    one,
    open_store,
    settle,
    stage,
    turn,
)
from tests.fakes.steps import commit_next, make_dispatch, make_pusher, room, serve, staged, train_next

pytestmark = pytest.mark.asyncio


@pytest.fixture(autouse=True)
def lifted(monkeypatch):
    monkeypatch.setattr(lifecycle, "admission_error", lambda unfinished: "")


def live(push):
    return w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0)


async def test_two_runs_train_and_serve_beside_each_other(tmp_path):
    async with open_store(tmp_path) as store:
        data, names = data_dir(tmp_path), [trainer_name(1), trainer_name(2), engine_name(1), engine_name(2)]
        for run in ("a", "b"):
            await add_run(store, run)
        for name in names:
            await add_worker(store, name, 1, "ready", f"/{name}")
        wire = FakeWire()
        wire.connected = dict.fromkeys(names, 1)
        dispatch, pusher = make_dispatch(store, data, wire), make_pusher(store, data, wire)
        for run in (1, 2):
            await dispatch._claim_next(run)
        assert [(name, order.job) for name, order in wire.sent] == [("trainer-1", 1), ("trainer-2", 2)]
        await dispatch.take_back("trainer-1", 1, True, "killed")
        assert [row["state"] for row in await store.read("SELECT state FROM job ORDER BY id")] == ["queued", "running"]
        assert {holder.name for holder in dispatch.holders()} == {"trainer-2"}
        order = wire.of(w.Run)[1]
        await dispatch.take_staged("trainer-2", staged(order, stage(Path(order.dir), order, run="b")))
        assert [row["step"] for row in await store.read("SELECT step FROM run ORDER BY id")] == [-1, 0]
        for engine in await store.write(pusher_engines):
            await pusher._send_due(engine)
        assert [name for name, push in wire.sent if isinstance(push, w.Push)] == ["engine-2-0"]
        await pusher.live(live(wire.of(w.Push)[0]))
        table = await store.write(load_table)
        assert table.runs == ("a", "b")
        assert [(route.engine, [s.name for s in route.served]) for route in table.engines] == [
            ("engine-1-0", []), ("engine-2-0", ["b@0"]),
        ]  # fmt: skip


TWO = {"replicas": 2}


async def two_served(store, data, kills=None):
    """A run whose two engines get step 0; returns the engines, the wire and the pusher."""
    await add_run(store, engine=EngineSpec(**TWO))
    await commit_next(store, data)
    engines = [engine_name(1, replica) for replica in range(2)]
    for name in engines:
        await add_worker(store, name, 1, "ready", f"/{name}")
    wire = FakeWire()
    wire.connected = dict.fromkeys(engines, 1)
    pusher = make_pusher(store, data, wire, kills)
    for name in engines:
        await pusher._send_due(name)
    assert len(pusher._sending) == 2 and len({push.fence for push in wire.of(w.Push)}) == 2
    return engines, wire, pusher


async def restart(store, wire, pusher, engine, error="killed"):
    """The engine's process dies, and another one is ready."""
    spawn = wire.connected.pop(engine)
    await add_worker(store, engine, spawn, "backoff")
    await pusher.engine_died(engine, error)
    wire.connected[engine] = spawn + 1
    await add_worker(store, engine, spawn + 1, "ready", f"/{engine}")


def push_to(wire, engine):
    """The newest push that the engine was sent."""
    return [message for name, message in wire.sent if isinstance(message, w.Push) and name == engine][-1]


async def test_a_push_holds_its_own_engine_alone(tmp_path):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        second = wire.of(w.Push)[1]
        await pusher.pausing(w.Pausing(push=second.push, fence=second.fence))
        table = await store.write(load_table)
        assert [(route.engine, route.hold) for route in table.engines] == [(engines[0], False), (engines[1], True)]
        assert [name for name, message in wire.sent if isinstance(message, w.Proceed)] == [engines[1]]


async def test_an_engine_that_dies_leaves_the_other_serving(tmp_path):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        for push in wire.of(w.Push):
            await pusher.live(live(push))
        await pusher.engine_died(engines[0], "killed")
        rows = await store.read("SELECT engine, state FROM serving ORDER BY engine")
        assert [tuple(row) for row in rows] == [(engines[0], "gone"), (engines[1], "live")]
        wire.connected[engines[0]] = 2
        await add_worker(store, engines[0], 2, "ready", "/again")
        await pusher._send_due(engines[0])  # prepares the push
        await pusher._send_due(engines[0])
        (again,) = [push for name, push in wire.sent if isinstance(push, w.Push)][2:]
        assert again.name == "r@0" and pusher._sending.keys() == {engines[0]}


async def fail(store, wire, pusher, engine, times):
    """So many pushes to the engine fail, one after the other; each is due at once."""
    for _ in range(times):
        await pusher._send_due(engine)
        push = push_to(wire, engine)
        await pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="bad"))
        await restart(store, wire, pusher, engine)


async def test_an_engine_whose_pushes_fail_does_not_pause_a_run_that_another_one_serves(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        await pusher.live(live(push_to(wire, engines[0])))
        await fail(store, wire, pusher, engines[1], MAX_ATTEMPTS)
        assert await one(store, "SELECT state FROM run") == "active"
        (row,) = await store.read("SELECT state, attempts, not_before FROM push WHERE engine = ?", (engines[1],))
        assert (row["state"], row["attempts"]) == ("prepared", MAX_ATTEMPTS)
        assert row["not_before"] == store.clock.now_ms() + DELAY_MS
        sent = len(wire.sent)
        await pusher._send_due(engines[1])
        assert len(wire.sent) == sent, "it is tried again later"
        clock.advance(DELAY_MS / 1000)
        await pusher._send_due(engines[1])
        await pusher.live(live(push_to(wire, engines[1])))
        rows = await store.read("SELECT engine FROM serving WHERE state = 'live' ORDER BY engine")
        assert [row["engine"] for row in rows] == engines


async def test_an_operator_need_not_wait_for_the_next_attempt(tmp_path):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        await pusher.live(live(push_to(wire, engines[0])))
        await fail(store, wire, pusher, engines[1], MAX_ATTEMPTS)
        await store.write(lambda c: set_run_state(c, 0, 1, "active", ""))
        await pusher._send_due(engines[1])
        assert push_to(wire, engines[1]).fence == pusher._sending[engines[1]].message.fence


@pytest.mark.parametrize("how", ["fails", "is broken"])
async def test_a_run_is_paused_when_no_engine_may_serve_it(tmp_path, how):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        if how == "fails":
            await fail(store, wire, pusher, engines[0], MAX_ATTEMPTS)
        else:
            await pusher.engine_died(engines[0], "killed")
            await store.write(lambda c: c.execute("UPDATE process SET state = 'broken' WHERE name = ?", (engines[0],)))
        assert await one(store, "SELECT state FROM run") == "active", "the other one may serve"
        await fail(store, wire, pusher, engines[1], MAX_ATTEMPTS - 1)
        assert await one(store, "SELECT state FROM run") == "active"
        await fail(store, wire, pusher, engines[1], 1)
        assert await one(store, "SELECT state FROM run") == "paused"
        assert "failed 5 times: verify: bad" in await one(store, "SELECT reason FROM run")


async def test_a_wait_ends_with_the_first_engine_or_with_all(tmp_path):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        names = {"r@0": frozenset(engines)}
        runs = lifecycle.Runs(store, lambda _: None, lambda: names)

        async def served(which):
            answer = await runs.wait(api.WaitStep(run="r", step=0, timeout_s=0.0, engines=which))
            return isinstance(answer, api.StepInfo)

        await pusher.live(live(push_to(wire, engines[1])))
        assert (await served("first"), await served("all")) == (True, False)
        await pusher.live(live(push_to(wire, engines[0])))
        assert await served("all")
        names["r@0"] = frozenset(engines[:1])
        assert (await served("first"), await served("all")) == (True, False), (
            "the gateway does not send to the other yet"
        )


async def test_a_broken_engine_is_a_problem_of_those_who_wait_for_all(tmp_path):
    async with open_store(tmp_path) as store:
        engines, *_ = await two_served(store, data_dir(tmp_path))
        await store.write(
            lambda c: c.execute("UPDATE process SET state = 'broken', error = 'x' WHERE name = ?", (engines[1],))
        )
        runs = lifecycle.Runs(store, lambda _: None, dict)

        async def problem(engines):
            answer = await runs.wait(api.WaitStep(run="r", step=0, timeout_s=0.0, engines=engines))
            assert isinstance(answer, api.Pending)
            return answer.problem

        assert (await problem("first"), await problem("all")) == ("", "engine 1 is broken: x")
        await store.write(lambda c: c.execute("UPDATE process SET state = 'broken', error = 'x'"))
        assert await problem("first") == "engine is broken: x"


async def test_the_gateways_confirmation_counts_for_the_engines_that_it_named(tmp_path):
    async with open_store(tmp_path) as store:
        engines, wire, pusher = await two_served(store, data_dir(tmp_path))
        wire.connected["gateway"] = 1
        router = Router(store, wire)
        routing = asyncio.ensure_future(router.run())
        for engine, known in zip(engines, (engines[:1], engines), strict=True):
            before = len(wire.of(w.Route))
            await pusher.live(live(push_to(wire, engine)))
            await until(lambda before=before: len(wire.of(w.Route)) > before)
            router.confirm(w.RouteTaken(seq=wire.of(w.Route)[-1].seq))
            await until(lambda known=known: router.routed == {"r@0": frozenset(known)})
        await restart(store, wire, pusher, engines[0])
        await until(lambda: router.routed == {"r@0": frozenset(engines[1:])})
        await settle(routing)


async def train(store, data, pusher, wire, spawn=1):
    """Step 1, which the trainer holds, is sent to both engines from its memory."""
    await add_worker(store, trainer_name(1), spawn, "ready")
    wire.connected[trainer_name(1)] = spawn
    await train_next(store, data)
    for replica in range(2):
        await pusher._send_due(engine_name(1, replica))


async def test_an_engine_that_lags_behind_another_one_is_not_waited_for_long(tmp_path):
    """The trainer may not change its weights while an engine reads them, so one that hangs holds up the run."""
    async with open_store(tmp_path) as store:
        data, kills = data_dir(tmp_path), []
        engines, wire, pusher = await two_served(store, data, kills)
        for engine in engines:
            await pusher.live(live(push_to(wire, engine)))
        await train(store, data, pusher, wire)
        assert {push_to(wire, engine).source for engine in engines} == {"live"}
        await pusher.live(live(push_to(wire, engines[0])))
        lagging = push_to(wire, engines[1])
        pusher._watch(pusher._awake.now() + LAG_S)
        assert kills == [], "requests may drain meanwhile"
        pusher.beat(w.Beat(push=lagging.push, fence=lagging.fence, progress=1))
        pusher._watch(pusher._awake.now() + LAG_S + lagging.drain_s + 1)
        assert [name for name, _ in kills] == [engines[1]]


async def test_an_engine_may_serve_until_it_failed_too_often():
    assert may_serve(EngineHealth(True, 9, False), 5) and may_serve(EngineHealth(False, 4, False), 5)
    assert not may_serve(EngineHealth(False, 5, False), 5) and not may_serve(EngineHealth(False, 0, True), 5)


@pytest.mark.parametrize("gpus, replicas, shares", [
    ((), 2, [(), ()]), ((3,), 1, [(3,)]), ((1, 2), 1, [(1, 2)]), ((1, 2), 2, [(1,), (2,)]),
    ((0, 1, 2, 3), 2, [(0, 2), (1, 3)]), ((5, 6), 3, [(5,), (6,), (5,)]),
])  # fmt: skip
async def test_the_engines_of_a_run_divide_its_gpus(gpus, replicas, shares):
    assert [share_of(gpus, replica, replicas) for replica in range(replicas)] == shares


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


async def test_workers_of_runs_that_are_over_are_not_listed(tmp_path):
    async with open_store(tmp_path) as store:
        for run, name in enumerate(("first", "second", "third"), 1):
            await add_run(store, name)
            for worker in (trainer_name(run), engine_name(run)):
                await add_worker(store, worker)
        await add_worker(store, "gateway")
        await store.write(lambda c: set_run_state(c, 0, 2, "finished", ""))
        shown = [(row["name"], row["run"]) for row in await store.ask(lambda c: read(c, Page("workers")))]
        assert shown == [
            ("trainer-1", "first"), ("trainer-3", "third"), ("engine-1-0", "first"), ("engine-3-0", "third"), ("gateway", None),
        ]  # fmt: skip

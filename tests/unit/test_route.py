"""route: the gateway's table says what is live and holds what is being changed."""

from __future__ import annotations

import asyncio

import pytest

from artd.runs.lifecycle import set_run_state
from artd.serving.routing_table import Router, load_table
from artd_schema.wire import worker as w
from tests.awake import SOON_S, until
from tests.fakes.rows import BASE, ENGINE, MIXTURE, ROUTES, FakeWire, add_run, add_worker, data_dir, open_store, settle
from tests.fakes.steps import commit_next, make_pusher, train_next

pytestmark = pytest.mark.asyncio


async def load(store):
    """(runs, engines) of the table that the rows make."""
    table = await store.write(load_table)
    return table.runs, table.engines


async def go_live(store, data, pusher):
    await pusher._send_due(ENGINE)
    push = pusher._sending[ENGINE].message
    await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))


async def test_no_run_no_route(tmp_path):
    async with open_store(tmp_path) as store:
        assert (await store.write(load_table))[:2] == ((), ())
        await add_run(store)
        assert (await store.write(load_table))[:2] == (("r",), ())
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        assert (await store.write(load_table))[:2] == ((), ())


async def test_an_engine_is_listed_when_it_is_ready_and_has_an_address(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store)
        for state, address, listed in [
            ("starting", "/s", 0),
            ("ready", "", 0),
            ("ready", "/s", 1),
            ("backoff", "/s", 0),
        ]:
            await add_worker(store, "engine", 1, state, address)
            engines = (await store.write(load_table)).engines
            assert len(engines) == listed, (state, address)


async def pause(pusher):
    """The engine wants to pause for the push under way."""
    push = pusher._sending[ENGINE].message
    await pusher.pausing(w.Pausing(push=push.push, fence=push.fence))


async def test_a_merged_push_holds_from_its_pause_to_its_live(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        pusher = make_pusher(store, data, FakeWire(trainer=1, engine=1))
        (before,) = (await store.write(load_table)).engines
        assert not before.hold and before.served == ()
        await pusher._send_due(ENGINE)
        (sent,) = (await store.write(load_table)).engines
        assert not sent.hold
        await pause(pusher)
        (during,) = (await store.write(load_table)).engines
        assert during.hold and during.served == ()
        push = pusher._sending[ENGINE].message
        await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))
        (after,) = (await store.write(load_table)).engines
        assert not after.hold and after.served == (w.Served(name="r@0", run="r", step=0, epoch=0),)
        assert (after.socket, after.base_model, after.max_model_len) == ("/s", "r", 1024)
        await train_next(store, data)
        await pusher._send_due(ENGINE)
        await pause(pusher)
        (again,) = (await store.write(load_table)).engines
        assert again.hold and [s.name for s in again.served] == ["r@0"]


async def test_a_lora_push_does_not_hold_and_the_newest_comes_last(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, rollout_weights_mode="lora")
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        pusher = make_pusher(store, data, FakeWire(trainer=1, engine=1))
        await go_live(store, data, pusher)
        await train_next(store, data)
        await pusher._send_due(ENGINE)
        (during,) = (await store.write(load_table)).engines
        assert not during.hold and [s.name for s in during.served] == ["r@0"]
        push = pusher._sending[ENGINE].message
        await pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))
        (after,) = (await store.write(load_table)).engines
        assert [s.name for s in after.served] == ["r@0", "r@1"]


async def test_every_new_table_is_sent_once_and_again_to_a_new_gateway(tmp_path):
    async with open_store(tmp_path) as store:
        wire = FakeWire()
        task = asyncio.ensure_future(Router(store, wire).run())
        await add_run(store)
        await asyncio.sleep(0.1)
        assert not wire.sent
        wire.connected["gateway"] = 1
        await add_worker(store, "engine", 1, "ready", "/s")
        await until(lambda: wire.of(w.Route))
        (first,) = wire.of(w.Route)
        assert first.runs == ("r",) and first.engines[0].socket == "/s"
        await store.write(lambda c: c.execute("UPDATE run SET reason = 'x'").rowcount)  # changes no route
        await asyncio.sleep(0.1)
        assert len(wire.of(w.Route)) == 1
        wire.connected["gateway"] = 2
        await store.write(lambda c: c.execute("UPDATE run SET reason = 'y'").rowcount)
        await until(lambda: len(wire.of(w.Route)) > 1)
        assert [r.seq for r in wire.of(w.Route)] == [1, 2]
        await settle(task)


async def test_every_hold_makes_a_new_table_for_it_ends_only_with_one(tmp_path):
    """The push may fail before any table is sent that holds; the next one looks like the last, and must still be sent."""
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        pusher = make_pusher(store, data, FakeWire(trainer=1, engine=1))
        before = await store.write(load_table)
        await pusher._send_due(ENGINE)
        await pause(pusher)
        push = pusher._sending[ENGINE].message
        await pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="load", error="x"))
        after = await store.write(load_table)
        assert before.engines == after.engines and before != after


async def test_a_step_of_a_finished_run_is_not_served_under_the_next_ones_name(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        await go_live(store, data, make_pusher(store, data, FakeWire(engine=1)))
        await store.write(lambda c: set_run_state(c, 0, 1, "finished", ""))
        await add_run(store, "next")
        assert await load(store) == (("next",), ())


async def test_what_the_gateway_confirmed_is_routed(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store)
        await commit_next(store, data)
        await add_worker(store, "engine", 1, "ready", "/s")
        await go_live(store, data, make_pusher(store, data, FakeWire(engine=1)))
        wire = FakeWire(gateway=1)
        router = Router(store, wire)
        task = asyncio.ensure_future(router.run())
        await until(lambda: wire.of(w.Route))
        (sent,) = wire.of(w.Route)
        assert router.routed == {}
        router.confirm(w.RouteTaken(seq=sent.seq - 1))
        assert router.routed == {}
        changed = store.change()
        router.confirm(w.RouteTaken(seq=sent.seq))
        assert router.routed == {"r@0": {ENGINE}}
        await asyncio.wait_for(changed.wait(), SOON_S)
        await store.write(lambda c: c.execute("UPDATE serving SET state = 'gone'").rowcount)
        await until(lambda: not router.routed)  # a name that is served no more
        await settle(task)


@pytest.mark.parametrize(
    ("base", "replay", "expected"), [(MIXTURE, True, ROUTES), (MIXTURE, False, None), (BASE, True, None)]
)
async def test_the_gateway_is_told_whether_engines_capture_experts(tmp_path, base, replay, expected):
    async with open_store(tmp_path) as store:
        await add_run(store, base=base, expert_replay=replay)
        await add_worker(store, "engine", 1, "ready", "/s")
        (_, (engine,)) = await load(store)
        assert engine.routes == expected

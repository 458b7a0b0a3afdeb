"""The hold: an engine is told to go on only when the gateway admits nothing to it, and nothing is held for ever."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from artd.datadir.layout import DataDir
from artd.serving.pusher import HELD_S, Pusher
from artd.serving.routing_table import Router, load_table
from artd.store.store import WAKE_S, Store
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import GATEWAY
from tests.fakes.rows import ENGINE, TRAINER, FakeWire, add_run, add_worker, data_dir, open_store, settle
from tests.fakes.steps import commit_next, make_pusher, train_next

pytestmark = pytest.mark.asyncio


class World:
    """A run whose engine serves step 0 and whose step 1 is due, a gateway, its routing table and the pusher. tasks: what the
    daemon does beside."""

    def __init__(self, store: Store, data: DataDir) -> None:
        self.store, self.data = store, data
        self.wire = FakeWire(trainer=1, engine=1, gateway=1)
        self.kills: list[tuple[str, str]] = []
        self.pusher: Pusher = make_pusher(store, data, self.wire, self.kills)
        self.tasks = [asyncio.ensure_future(Router(store, self.wire).run())]

    async def push(self) -> w.Push:
        """The push that is due, sent."""
        await self.pusher._send_due(ENGINE)
        return self.wire.of(w.Push)[-1]

    async def pausing(self, push: w.Push, /, **changes: int) -> None:
        """The engine wants to pause; returns when the gateway was asked, or would have been."""
        message = w.Pausing(**({"push": push.push, "fence": push.fence} | changes))
        self.tasks.append(asyncio.ensure_future(self.pusher.pausing(message)))
        await self.rest()

    async def held(self, push: w.Push, /, **changes: int) -> None:
        self.pusher.take_held(
            w.Held(**({"push": push.push, "fence": push.fence, "engine": ENGINE, "in_flight": 0} | changes))
        )
        await self.rest()

    async def live(self, push: w.Push) -> None:
        await self.pusher.live(w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0))

    async def serve(self) -> None:
        """Step 0 is live, and the trainer has made step 1."""
        push = await self.push()
        if push.mode == "merged":
            await self.pausing(push)
            await self.held(push)
        await self.live(push)
        await train_next(self.store, self.data)
        self.wire.sent.clear()

    async def rest(self) -> None:
        """Whatever can go on has gone on: what is awaited, the tables that hang on it, and what hangs on these."""
        for _ in range(3):
            await asyncio.sleep(1.2 * WAKE_S)
            await self.store.write(lambda c: None)

    async def died(self) -> None:
        """The engine's process is proven dead, and the next one is ready."""
        spawn = self.wire.connected.pop(ENGINE)
        await add_worker(self.store, ENGINE, spawn, "backoff")
        await self.pusher.engine_died(ENGINE, "killed")
        self.wire.connected[ENGINE] = spawn + 1
        await add_worker(self.store, ENGINE, spawn + 1, "ready", "/e.sock")

    def order(self) -> list[str]:
        """What was sent, without tables."""
        return [f"{type(m).__name__} {name}" for name, m in self.wire.sent if not isinstance(m, w.Route)]

    def holding(self) -> bool:
        """Whether the gateway that is there admits nothing to the engine, by all that it was sent."""
        held = False
        for _, message in self.wire.sent:
            if isinstance(message, w.Route):
                held = any(engine.hold for engine in message.engines)
            held |= isinstance(message, w.Hold)
        return held


@contextlib.asynccontextmanager
async def world(tmp_path, mode: str = "merged") -> AsyncIterator[World]:
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, rollout_weights_mode=mode)
        await commit_next(store, data)
        await add_worker(store, ENGINE, 1, "ready", "/e.sock")
        it = World(store, data)
        await it.serve()
        yield it
        for task in it.tasks:
            await settle(task)


async def test_hold_is_asked_when_the_engine_wants_to_pause_and_proceed_sent_when_it_is_confirmed(tmp_path):
    async with world(tmp_path) as it:
        push = await it.push()
        await it.rest()
        assert it.order() == [f"Push {TRAINER}", f"Push {ENGINE}"] and not it.holding(), "it generates still"
        await it.pausing(push)
        assert it.order()[2:] == ["Hold gateway"] and it.holding()
        for stale in ({"push": push.push + 1}, {"fence": push.fence - 1}, {"fence": push.fence + 1}):
            await it.held(push, **stale)
        assert not it.wire.of(w.Proceed)
        await it.held(push)
        assert it.order()[2:] == ["Hold gateway", f"Proceed {ENGINE}"]
        assert it.wire.of(w.Proceed) == [w.Proceed(push=push.push, fence=push.fence)]
        (table,) = (await it.store.write(load_table)).engines
        assert table.hold, "as long as the push is under way"
        await it.live(push)
        await it.rest()
        assert not it.holding() and it.wire.of(w.Route)[-1].engines[0].served[0].name == "r@1"


async def test_the_row_is_there_before_the_gateway_is_asked(tmp_path):
    """A gateway that is started just then must get a table that holds."""
    async with world(tmp_path) as it:
        push = await it.push()
        send, tables = it.wire.send, []

        def watch(name, message, bulk=()):
            if isinstance(message, w.Hold):
                tables.append(it.store.submit(load_table))
            return send(name, message, bulk)

        it.wire.send = watch
        await it.pausing(push)
        assert (await tables[0]).engines[0].hold


@pytest.mark.parametrize("stale", [{"push": 99}, {"fence": 0}, {"fence": 99}])
async def test_pausing_of_another_attempt_is_ignored(tmp_path, stale):
    async with world(tmp_path) as it:
        push = await it.push()
        await it.pausing(push, **stale)
        assert not it.wire.of(w.Hold) and not it.wire.of(w.Proceed) and not it.holding()


async def test_pausing_said_twice_holds_once(tmp_path):
    async with world(tmp_path) as it:
        push = await it.push()
        for _ in range(2):
            await it.pausing(push)
        await it.held(push)
        assert it.order()[2:] == ["Hold gateway", f"Proceed {ENGINE}"]


async def test_a_lora_push_never_holds(tmp_path):
    async with world(tmp_path, "lora") as it:
        push = await it.push()
        await it.rest()
        assert not it.holding()
        await it.live(push)
        await it.rest()
        assert not it.wire.of(w.Hold) and not it.holding()


async def test_without_a_gateway_nothing_is_admitted_and_the_next_ones_first_table_holds(tmp_path):
    async with world(tmp_path) as it:
        it.wire.connected.pop(GATEWAY)
        push = await it.push()
        await it.pausing(push)
        assert it.order()[2:] == [f"Proceed {ENGINE}"]
        it.wire.connected[GATEWAY] = 2
        it.store.announce()
        await it.rest()
        assert [route.engines[0].hold for route in it.wire.of(w.Route)][-1]


async def test_a_gateway_that_dies_is_not_waited_for(tmp_path):
    async with world(tmp_path) as it:
        push = await it.push()
        it.pusher.gateway_died()  # before anybody waits: the next one has to confirm
        await it.pausing(push)
        assert not it.wire.of(w.Proceed)
        it.wire.connected.pop(GATEWAY)
        it.pusher.gateway_died()
        await it.rest()
        assert it.order()[2:] == ["Hold gateway", f"Proceed {ENGINE}"] and it.kills == []


async def test_a_gateway_that_was_started_while_the_row_was_written_has_to_confirm(tmp_path):
    """The death of the one before says nothing of it. A disk that is full makes the row wait so long."""
    async with world(tmp_path) as it:
        push = await it.push()
        write, full = it.store.write, asyncio.Event()

        async def waits(fn):
            await full.wait()
            return await write(fn)

        it.store.write = waits
        it.tasks.append(asyncio.ensure_future(it.pusher.pausing(w.Pausing(push=push.push, fence=push.fence))))
        await asyncio.sleep(0)
        it.pusher.gateway_died()
        it.wire.connected[GATEWAY] = 2
        it.store.write = write
        full.set()
        await it.rest()
        assert it.order()[2:] == ["Hold gateway"], "it may admit until it has said Held"
        await it.held(push)
        assert it.order()[2:] == ["Hold gateway", f"Proceed {ENGINE}"]


async def test_a_gateway_that_does_not_confirm_is_killed_and_its_death_waited_for(tmp_path, monkeypatch):
    assert HELD_S >= 5
    async with world(tmp_path) as it:
        monkeypatch.setattr("artd.serving.pusher.HELD_S", 0.05)
        push = await it.push()
        await it.pausing(push)
        await asyncio.sleep(0.1)
        assert [name for name, _ in it.kills] == [GATEWAY] and "did not confirm" in it.kills[0][1]
        assert not it.wire.of(w.Proceed), "it may admit until it is dead"
        it.wire.connected.pop(GATEWAY)
        it.pusher.gateway_died()
        await it.rest()
        assert it.wire.of(w.Proceed)


async def test_a_push_that_fails_while_it_is_held_releases(tmp_path):
    async with world(tmp_path) as it:
        before = it.wire.of(w.Route)
        push = await it.push()
        await it.pausing(push)
        await it.held(push)
        await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="pause", error="x"))
        await it.rest()
        assert not it.holding() and len(it.wire.of(w.Route)) > len(before)
        assert it.wire.of(w.Route)[-1].engines[0].served == (), "its weights are unknown, and it lives still"


@pytest.mark.parametrize("confirmed", [False, True])
async def test_an_engine_that_dies_under_the_hold(tmp_path, confirmed):
    """Nothing is said to the next process, nobody is killed for the old one, and the next push asks anew."""
    async with world(tmp_path) as it:
        old = await it.push()
        await it.pausing(old)
        if confirmed:
            await it.held(old)
        await it.died()
        await it.held(old)
        await it.rest()
        assert len(it.wire.of(w.Proceed)) == confirmed and not it.holding()
        assert it.tasks[-1].done(), "it would wait on, and kill the gateway for a push that is over"
        new = await it.push()
        assert new.push == old.push and new.fence > old.fence
        await it.pausing(old)
        assert len(it.wire.of(w.Hold)) == 1 and not it.holding()
        await it.pausing(new)
        await it.held(old)
        assert len(it.wire.of(w.Proceed)) == confirmed, "an answer to the old attempt says nothing of this one"
        await it.held(new)
        assert it.wire.of(w.Proceed)[-1].fence == new.fence and it.kills == []


async def test_an_engine_that_dies_while_the_row_is_written_is_not_held_for(tmp_path):
    """Its table that releases may have been sent already: a hold after it would last for ever."""
    async with world(tmp_path) as it:
        push = await it.push()
        died = asyncio.ensure_future(it.pusher.engine_died(ENGINE, "killed"))
        await it.pausing(push)
        await died
        await it.rest()
        assert it.order() == [f"Push {TRAINER}", f"Push {ENGINE}", f"PushEnd {TRAINER}"] and not it.holding()

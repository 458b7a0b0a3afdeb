"""push on a real store: the served step changes with a verified Live and in no other way."""

from __future__ import annotations

import pytest

from artd.runs.lifecycle import set_run_state
from artd.serving.push_ends import MAX_ATTEMPTS
from artd.serving.pusher import DEADLINE_S, GONE_S
from artd_schema.wire import worker as w
from artd_schema.wire.worker_names import engine_name
from tests.fakes.rows import ENGINE, TRAINER, FakeClock, FakeWire, add_run, add_worker, count, data_dir, one, open_store
from tests.fakes.steps import commit_next, make_pusher, serve, train_next

pytestmark = pytest.mark.asyncio


class World:
    """A run with checkpoint 0, a ready engine, and its pusher."""

    def __init__(self, store, data, clock, wire, pusher, kills):
        self.store, self.data, self.clock, self.wire, self.pusher, self.kills = store, data, clock, wire, pusher, kills

    async def send(self):
        """One look of the pusher; the Push that it sent, if it did."""
        before = len(self.wire.of(w.Push))
        await self.pusher._send_due(ENGINE)
        sent = [m for name, m in self.wire.sent if isinstance(m, w.Push) and name == ENGINE]
        return sent[-1] if len(self.wire.of(w.Push)) > before else None

    def states(self):
        return self.store.read("SELECT id, state FROM push ORDER BY id")

    async def push_states(self):
        return [row["state"] for row in await self.states()]

    async def restart_engine(self, error="it fell"):
        """The process dies, is proven dead, and another one is ready."""
        spawn = self.wire.connected.pop(ENGINE, 0)
        await add_worker(self.store, "engine", spawn, "backoff")
        await self.pusher.engine_died(ENGINE, error)
        self.wire.connected[ENGINE] = spawn + 1
        await add_worker(self.store, "engine", spawn + 1, "ready", "/e.sock")


async def make(store, tmp_path, clock, **changes):
    data = data_dir(tmp_path)
    await add_run(store, **changes)
    await commit_next(store, data)
    await add_worker(store, "engine", 1, "ready", "/e.sock")
    wire, kills = FakeWire(trainer=1, engine=1), []
    return World(store, data, clock, wire, make_pusher(store, data, wire, kills), kills)


def live(push, /, **changes):
    return w.Live(**({"push": push.push, "fence": push.fence, "max_abs": 1e-6, "mean_abs": 1e-7} | changes))


@pytest.fixture
def clock():
    return FakeClock()


async def test_the_first_push_is_from_disk_and_becomes_live(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        assert (push.source, push.mode, push.name, push.fence, push.rendezvous) == ("disk", "merged", "r@0", 1, "")
        assert push.checkpoint.step == 0 and await count(store, "serving") == 0
        assert await it.push_states() == ["sending"]
        await it.pusher.live(live(push, seconds={"load": 1.0}))
        assert await it.push_states() == ["live"]
        (row,) = await store.read("SELECT * FROM serving")
        assert (row["name"], row["state"], row["spawn"]) == ("r@0", "live", 1)
        assert await one(store, "SELECT max_abs FROM push") == 1e-6
        assert await it.send() is None


@pytest.mark.parametrize("changes", [{"fence": 0}, {"fence": 2}, {"push": 99}])
async def test_live_with_another_fence_changes_nothing(tmp_path, clock, changes):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        events = await count(store, "event")
        await it.pusher.live(live(push, **changes))
        assert await it.push_states() == ["sending"] and await count(store, "serving") == 0
        assert await count(store, "event") == events and it.pusher._sending
        await it.pusher.live(live(push))
        assert await it.push_states() == ["live"]


async def test_live_of_a_push_that_was_put_back_changes_nothing(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        old = await it.send()
        await it.restart_engine()
        await it.pusher.live(live(old))
        assert await it.push_states() == ["prepared"]
        new = await it.send()
        assert new.push == old.push and new.fence > old.fence
        await it.pusher.live(live(old))
        assert await it.push_states() == ["sending"] and await count(store, "serving") == 0


async def test_live_without_a_connected_engine_changes_nothing(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        it.wire.connected.pop(ENGINE)
        await it.pusher.live(live(push))
        assert await it.push_states() == ["sending"]


async def test_a_newer_checkpoint_supersedes_what_is_prepared(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await train_next(store, it.data)
        await train_next(store, it.data)
        push = await it.send()
        assert push.name == "r@2" and await it.push_states() == ["superseded", "superseded", "sending"]


async def test_the_live_one_is_superseded_by_the_next(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.pusher.live(live(await it.send()))
        await train_next(store, it.data)
        push = await it.send()
        assert await it.push_states() == ["live", "sending"]
        assert await one(store, "SELECT name FROM serving WHERE state = 'live'") == "r@0"  # until Live
        await it.pusher.live(live(push))
        assert await it.push_states() == ["superseded", "live"]
        assert await one(store, "SELECT name FROM serving WHERE state = 'live'") == "r@1"


async def test_lora_keeps_two_steps_and_unloads_the_third(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock, rollout_weights_mode="lora")
        for step in range(3):
            if step:
                await train_next(store, it.data)
            await it.pusher.live(live(await it.send()))
        assert [m.name for m in it.wire.of(w.Unload)] == ["r@0"] and not it.wire.of(w.Hold)
        names = await store.read("SELECT name FROM serving WHERE state = 'live' ORDER BY id")
        assert [row[0] for row in names] == ["r@1", "r@2"]


async def test_one_push_at_a_time(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.send()
        await train_next(store, it.data)
        assert await store.write(lambda c: it.pusher._claim(c, ENGINE)) is None
        assert await it.push_states() == ["sending", "prepared"]


async def test_a_failed_push_goes_back_and_waits_for_the_next_process(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="canary"))
        (row,) = await store.read("SELECT * FROM push")
        assert (row["state"], row["attempts"], row["error"]) == ("prepared", 1, "verify: canary")
        assert await it.send() is None, "the process that failed is unknown and must not be pushed to again"
        await it.restart_engine()
        assert await one(store, "SELECT attempts FROM push") == 1
        again = await it.send()
        assert again.push == push.push and again.fence == push.fence + 1 and again.source == "disk"


async def test_a_failure_with_an_old_fence_changes_nothing(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence - 1, phase="load", error="x"))
        assert await it.push_states() == ["sending"] and it.pusher._sending


async def test_five_failures_pause_the_run_and_resume_tries_again(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        for attempt in range(MAX_ATTEMPTS):
            assert await one(store, "SELECT state FROM run") == "active"
            push = await it.send()
            assert push is not None, attempt
            await it.pusher.take_failed(
                w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="bad\nlong")
            )
            await it.restart_engine()
        assert await it.push_states() == ["failed"]
        assert await one(store, "SELECT reason FROM run") == "push 1 failed 5 times: verify: bad"
        assert await it.send() is None and await it.push_states() == ["failed"]
        await store.write(lambda c: set_run_state(c, 0, 1, "active", ""))
        assert await it.send() is None  # this look makes the row
        assert await it.push_states() == ["failed", "prepared"]
        assert (await it.send()).push == 2


async def test_steps_that_all_fail_pause_the_run_although_each_is_a_push_of_its_own(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        for attempt in range(MAX_ATTEMPTS):
            assert await one(store, "SELECT state FROM run") == "active", attempt
            push = await it.send()
            await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="bad"))
            await it.restart_engine()
            if attempt < 3:
                await train_next(store, it.data)
        found = "push 4 failed 5 times in a row, with those of older steps: verify: bad"
        assert await one(store, "SELECT reason FROM run") == found


async def test_a_push_that_is_live_ends_the_count_of_failures(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        for _ in range(MAX_ATTEMPTS):
            push = await it.send()
            await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="verify", error="bad"))
            await it.restart_engine()
            await it.pusher.live(live(await it.send()))
            await train_next(store, it.data)
        assert await one(store, "SELECT state FROM run") == "active"


async def test_an_engine_that_dies_serves_nothing_and_gets_the_newest_from_disk(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.pusher.live(live(await it.send()))
        await it.restart_engine()
        assert await count(store, "serving", "state <> 'gone'") == 0
        assert await it.push_states() == ["superseded"]
        assert await it.send() is None
        push = await it.send()
        assert (push.name, push.source) == ("r@0", "disk")
        assert await one(store, "SELECT state FROM run") == "active"


async def test_a_live_push_comes_from_the_trainer_that_made_the_checkpoint(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.pusher.live(live(await it.send()))
        await train_next(store, it.data)
        push = await it.send()
        assert push.source == "live" and push.rendezvous
        assert [name for name, m in it.wire.sent if isinstance(m, w.Push)][-2:] == [TRAINER, ENGINE]
        await it.pusher.live(live(push))
        assert it.wire.of(w.PushEnd) == [w.PushEnd(push=push.push, fence=push.fence)]


async def test_another_trainer_process_cannot_feed_it(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.pusher.live(live(await it.send()))
        await train_next(store, it.data)
        it.wire.connected[TRAINER] = 2
        assert (await it.send()).source == "disk"


async def test_a_refusal_or_the_trainers_death_restarts_the_engine(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await it.pusher.live(live(await it.send()))
        await train_next(store, it.data)
        push = await it.send()
        await it.pusher.take_refused(w.Refused(push=99, fence=1, reason="?"))
        await it.pusher.take_refused(w.Refused(push=push.push, fence=push.fence - 1, reason="of an older attempt"))
        assert it.kills == []
        await it.pusher.take_refused(w.Refused(push=push.push, fence=push.fence, reason="not resident"))
        await it.pusher.trainer_died(TRAINER)
        assert [name for name, _ in it.kills] == [ENGINE, ENGINE] and "not resident" in it.kills[0][1]


def awake(it, clock, seconds):
    """So much time passes, in which the daemon looks every second."""
    for _ in range(int(seconds)):
        clock.advance(1)
        it.pusher._watch(it.pusher._awake.now())


async def test_a_push_past_its_deadline_ends_the_engine(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        awake(it, clock, push.deadline_s + push.drain_s - 1)
        assert it.kills == []
        awake(it, clock, 3)
        assert len(it.kills) == 1 and "passed its deadline without progress" in it.kills[0][1]


async def test_a_push_that_goes_on_has_time_and_so_has_one_of_a_daemon_that_was_stopped(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        for mark in range(5):  # a slow disk
            awake(it, clock, push.deadline_s)
            it.pusher.beat(w.Beat(push=push.push, fence=push.fence, progress=mark + 1))
        awake(it, clock, 60)
        clock.advance(3600)  # SIGSTOP
        awake(it, clock, 60)
        assert it.kills == []
        for _ in range(3):  # the same mark is no progress, nor is that of an older attempt
            awake(it, clock, push.drain_s + push.deadline_s / 3)
            it.pusher.beat(w.Beat(push=push.push, fence=push.fence, progress=5))
            it.pusher.beat(w.Beat(push=push.push, fence=push.fence - 1, progress=99))
        assert it.kills


async def test_the_deadline_follows_the_bytes_of_the_checkpoint(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await store.write(lambda c: c.execute("UPDATE checkpoint SET bytes = ?", (6 << 30,)))
        push = await it.send()
        assert push.deadline_s >= DEADLINE_S + 6 * 1024 / 10


async def test_an_engine_that_lives_on_after_its_push_failed_is_ended(tmp_path, clock):
    """It beats, is unknown, and gets nothing more: nobody else would ever end it."""
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        push = await it.send()
        await it.pusher.take_failed(w.PushFailed(push=push.push, fence=push.fence, phase="load", error="x"))
        awake(it, clock, GONE_S - 1)
        assert it.kills == [], "it tells first why its server ended"
        awake(it, clock, 3)
        assert len(it.kills) == 1 and "its push failed" in it.kills[0][1]
        await it.restart_engine()
        awake(it, clock, GONE_S + 1)
        assert len(it.kills) == 1


async def test_nothing_is_sent_to_an_engine_that_is_not_ready_or_not_connected(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await add_worker(store, "engine", 1, "starting")
        assert await it.send() is None
        await add_worker(store, "engine", 2, "ready")
        assert await it.send() is None  # the row is of a newer process than the one that is connected
        it.wire.connected[ENGINE] = 2
        assert await it.send() is not None


async def test_nothing_is_sent_to_another_runs_engine(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        spawn = it.wire.connected.pop(ENGINE)
        it.wire.connected[engine_name(2)] = spawn
        assert await it.send() is None
        it.wire.connected[ENGINE] = spawn
        assert await it.send() is not None


async def test_a_paused_run_is_still_pushed(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        await store.write(lambda c: set_run_state(c, 0, 1, "paused", "x"))
        assert await it.send() is not None


async def test_serve_helper_is_the_real_thing(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        await make(store, tmp_path, clock)
        await serve(store, 1, data_dir(tmp_path))
        assert await count(store, "serving", "state = 'live'") == 1


async def served_once(it):
    """The engine serves checkpoint 0, and the trainer has just made checkpoint 1."""
    await it.pusher.live(live(await it.send()))
    await train_next(it.store, it.data)


@pytest.mark.parametrize(
    ("trainer", "engine", "expected"),
    [
        ((), (), "gloo"),
        (("direct", "stock"), ("direct", "stock"), "direct"),
        (("direct", "stock"), ("stock",), "stock"),
        (("stock",), ("direct", "stock"), "stock"),
        (("nccl", "stock"), ("direct", "nccl", "stock"), "nccl"),
        (("direct", "nccl", "stock"), ("nccl", "stock"), "nccl"),
        (("gloo",), ("direct", "stock"), None),
    ],
)
async def test_a_live_push_travels_the_engines_best_way_that_the_trainer_can_go(
    tmp_path, clock, trainer, engine, expected
):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        for name, ways in ((TRAINER, trainer), (ENGINE, engine)):
            if ways:
                it.pusher.transfers.able(name, 1, ways)
        await served_once(it)
        push = await it.send()
        assert push.source == ("live" if expected else "disk") and push.transfer == (expected or "gloo")
        assert push.rendezvous.rpartition("/")[2] == (f"{expected}-1" if expected else "")
        assert await one(store, "SELECT transfer FROM push ORDER BY id DESC LIMIT 1") == expected
        await it.pusher.live(live(push))
        assert await it.push_states() == ["superseded", "live"]


async def test_a_way_that_a_trainer_refused_is_not_taken_again_by_this_spawn(tmp_path, clock):
    async with open_store(tmp_path, clock) as store:
        it = await make(store, tmp_path, clock)
        for name in (TRAINER, ENGINE):
            it.pusher.transfers.able(name, 1, ("direct", "nccl", "stock"))
        await served_once(it)
        push = await it.send()
        refusal = {"push": push.push, "fence": push.fence, "reason": "layer 3 is not covered"}
        await it.pusher.take_refused(w.Refused(**refusal, transfer="direct"))
        assert it.kills[-1][0] == ENGINE and "layer 3" in it.kills[-1][1]
        ways = it.pusher.transfers
        assert ways.choose((TRAINER, 1), (ENGINE, 1)) == "stock"
        ways.able(TRAINER, 2, ("direct", "nccl", "stock"))
        assert ways.choose((TRAINER, 2), (ENGINE, 1)) == "direct"
        ways.able(TRAINER, 3, ("nccl", "stock"))
        assert ways.choose((TRAINER, 3), (ENGINE, 1)) == "nccl"
        ways.rule_out((TRAINER, 3), ENGINE, "nccl")  # one GPU for both, or another NCCL
        assert ways.choose((TRAINER, 3), (ENGINE, 1)) == "stock"

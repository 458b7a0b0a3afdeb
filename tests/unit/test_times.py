"""times: whatever the wall clock does, deadlines keep the time that they had left, and nothing is deleted by its age."""

from __future__ import annotations

import asyncio

import pytest

from artd.core.deadlines import distrust, time_left
from artd.recover import identify
from artd.retention.clock_jumps import STOPPED, ClockWatch, resume_retention
from artd.rollouts import ingest as ingest_module
from artd.store.store import get_meta
from tests.awake import until
from tests.fakes.rows import FakeClock, add_run, count, data_dir, make_ingest, one, open_store, settle, submit

pytestmark = pytest.mark.asyncio
HOUR, DAY, YEAR = 3_600_000, 86_400_000, 365 * 86_400_000
JUMPS = pytest.mark.parametrize("jump", [YEAR, -YEAR, 2 * HOUR, -2 * HOUR, 60_000, -60_000])


async def test_what_is_left_is_read_by_the_clock_that_the_deadline_was_made_by():
    assert time_left(due=150, before=100, now=100 + YEAR, longest=600, otherwise=600) == 50
    assert (
        time_left(due=150 + YEAR, before=100, now=100 + YEAR, longest=600, otherwise=600) == 50
    )  # made after the jump
    assert time_left(due=150 - YEAR, before=100, now=100 - YEAR, longest=600, otherwise=600) == 50
    assert time_left(due=90, before=100, now=100 + YEAR, longest=600, otherwise=600) == 0  # due, and not yet done
    assert time_left(due=100 - DAY, before=100, now=100 + DAY, longest=600, otherwise=600) == 600  # of no clock
    assert distrust(0, 0) == distrust(0, DAY) == distrust(HOUR, 0) == ""
    assert "behind" in distrust(2 * HOUR, 0) and "ahead" in distrust(0, 8 * DAY)


async def deadlines(store):
    """Seconds that are left of the group, the delayed job and the delayed push."""
    rows = await store.read(
        "SELECT deadline AS due FROM trajectory_group UNION ALL SELECT not_before FROM job WHERE not_before > 0"
    )
    return [(row["due"] - store.clock.now_ms()) / 1000 for row in rows]


async def with_deadlines(store, root):
    await add_run(store, group_timeout_s=600.0)
    ingest = make_ingest(store, data_dir(root))
    await submit(ingest, key="a")
    now = store.clock.now_ms()
    await store.write(lambda c: c.execute("UPDATE job SET not_before = ?", (now + 30_000,)).rowcount)
    return ingest


@JUMPS
async def test_a_jump_shifts_what_is_stored(tmp_path, jump):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        ingest, times = await with_deadlines(store, tmp_path), ClockWatch(store)
        clock.advance(10)
        await times.correct_deadlines()
        assert not times.jumped() and await deadlines(store) == [590, 20]
        clock.ms += jump
        assert times.jumped()
        await submit(ingest, group="new", key="b")  # by the new clock, before anybody has noticed
        await times.correct_deadlines()
        late = 600 if abs(jump) > 600_000 else 600 + min(0, jump / 1000)  # a small jump cannot be told from waiting
        assert not times.jumped() and sorted(await deadlines(store)) == sorted([20, 590, late])
        await times.correct_deadlines()
        assert await count(store, "event", "kind = 'clock.jumped'") == 1
        assert bool(await store.write(lambda c: get_meta(c, STOPPED))) == (abs(jump) > HOUR)
        await store.write(lambda c: resume_retention(c, 0))
        assert await store.write(lambda c: get_meta(c, STOPPED)) == ""


@JUMPS
async def test_no_group_is_sealed_by_a_jump_and_each_is_at_its_time(tmp_path, jump, monkeypatch):
    monkeypatch.setattr(ingest_module, "LOOK_S", 0.01)
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        ingest, times = await with_deadlines(store, tmp_path), ClockWatch(store)
        ingest._jumped = times.jumped
        task = asyncio.ensure_future(ingest.run())
        clock.ms += jump
        await asyncio.sleep(0.05)
        assert await one(store, "SELECT state FROM trajectory_group") == "open"
        await times.correct_deadlines()
        await asyncio.sleep(0.05)
        assert await one(store, "SELECT state FROM trajectory_group") == "open"
        clock.advance(601)
        await until(lambda: count(store, "trajectory_group", "state <> 'open'"))
        await settle(task)


@JUMPS
async def test_a_jump_while_the_daemon_was_down_changes_nothing_either(tmp_path, jump):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        await with_deadlines(store, tmp_path)
        data = data_dir(tmp_path)
        clock.ms += jump
        clock.advance(100)
        await store.write(lambda c: identify(c, data, clock.now_ms()))
        assert await deadlines(store) == [600, 30]  # time without a daemon does not count
        clock.advance(50)
        await store.write(lambda c: identify(c, data, clock.now_ms()))
        assert await deadlines(store) == [600, 30]
        distrusted = jump < -HOUR or jump > 7 * DAY
        assert bool(await store.write(lambda c: get_meta(c, STOPPED))) == distrusted


async def test_a_jump_that_nobody_saw_before_the_end_gives_a_group_its_whole_time_again(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        ingest = await with_deadlines(store, tmp_path)
        clock.advance(300)
        clock.ms += YEAR
        await submit(ingest, group="new", key="b")  # the newest row bears the new time
        await store.write(lambda c: identify(c, data_dir(tmp_path), clock.now_ms()))
        assert sorted(await deadlines(store)) == [0, 600, 600]


async def test_the_service_looks_every_second(tmp_path, monkeypatch):
    monkeypatch.setattr("artd.retention.clock_jumps.PERIOD_S", 0.01)
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        await with_deadlines(store, tmp_path)
        task = asyncio.ensure_future(ClockWatch(store).run())
        await asyncio.sleep(0)
        clock.ms += YEAR
        await until(lambda: count(store, "event", "kind = 'clock.jumped'"))
        assert await deadlines(store) == [600, 30]
        await settle(task)


async def test_a_kill_gives_an_open_group_no_time_back(tmp_path):
    """Nothing happens but time: no event says how long the daemon ran."""
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        await with_deadlines(store, tmp_path)
        times, data = ClockWatch(store), data_dir(tmp_path)
        for _ in range(10):
            for _ in range(9):
                clock.advance(1)
                await times.correct_deadlines()
            clock.advance(300)  # nobody runs
            await store.write(lambda c: identify(c, data, clock.now_ms()))
            times = ClockWatch(store)
        assert await deadlines(store) == [510, 0]


async def test_nothing_is_written_while_nothing_has_a_deadline(tmp_path):
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        times = ClockWatch(store)
        before = store.commits
        for _ in range(5):
            clock.advance(1)
            await times.correct_deadlines()
        assert store.commits == before


@pytest.mark.parametrize("drift", [-900, 900, -30, 30])
async def test_a_clock_that_drifts_slowly_is_followed(tmp_path, drift):
    """Less than a jump at each look: as when NTP slews, or an operator sets the clock back little by little."""
    clock = FakeClock()
    async with open_store(tmp_path, clock) as store:
        await with_deadlines(store, tmp_path)
        times = ClockWatch(store)
        for second in range(1, 101):
            clock.advance(1)
            clock.ms += drift
            await times.correct_deadlines()
            left = (await deadlines(store))[0]
            assert abs(left - (600 - second)) <= 0.25
        assert await count(store, "event", "kind = 'clock.jumped'") == 0

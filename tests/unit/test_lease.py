"""lease: who was silent for too long, and who only seems to be."""

from __future__ import annotations

import contextlib

import anyio
import pytest

from artd.supervise.lease import Holder, Leases, heartbeat_s
from tests.fakes.rows import FakeClock


class Bench:
    """A trainer and an engine that owe heartbeats, and the orders that were given."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.clock = FakeClock()
        self.holders = [Holder("trainer", 1), Holder("engine", 4)]
        self.kills: list[tuple[str, int]] = []
        self.told: list[float] = []
        self.leases = Leases(self.clock, lease_s, lambda: self.holders, self.end)

    def end(self, name: str, seconds: float, spawn: int) -> None:
        self.kills.append((name, spawn))
        self.told.append(seconds)

    def wait(self, seconds: float, *heard: str) -> None:
        """Time passes, watched; those who are named send something every second."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            self.hear(*heard)
            self.leases.look()

    def hear(self, *names: str) -> None:
        for holder in self.holders:
            if holder.name in names:
                self.leases.renew(*holder)


def test_the_silent_one_is_ended_and_nobody_else():
    it = Bench()
    it.wait(300, "trainer", "engine")
    it.wait(29, "engine")
    assert it.kills == []
    it.wait(2, "engine")
    assert it.kills == [("trainer", 1)]


def test_the_next_process_has_a_lease_of_its_own():
    it = Bench()
    it.wait(25, "engine")
    it.holders[0] = Holder("trainer", 2)
    it.wait(25, "engine")
    assert it.kills == []
    it.leases.renew("trainer", 1)  # an old one that was let go
    it.wait(8, "engine")
    assert it.kills == [("trainer", 2)]


def test_a_daemon_that_was_stopped_blames_nobody():
    it = Bench()
    it.wait(10)
    it.clock.advance(3600)
    it.leases.look()
    assert it.kills == []
    it.wait(30)
    assert {name for name, _ in it.kills} == {"trainer", "engine"}


def test_silence_begins_when_something_was_heard_and_not_with_the_look_before_it():
    it = Bench(3600.0)
    it.leases.look()
    for heard_after, silent in ((59.0, 1.0), (1.0, 59.0)):
        it.clock.advance(heard_after)
        it.hear("trainer", "engine")
        it.clock.advance(silent)
        it.leases.look()
    for _ in range(59):
        it.clock.advance(60.0)
        it.leases.look()
    assert it.kills == []  # 3599 s
    it.clock.advance(60.0)
    it.leases.look()
    assert it.kills == it.holders and it.told == [3659.0, 3659.0]


def test_a_sound_after_the_daemon_was_stopped_gives_no_credit():
    """The heartbeats that lay unread are taken before anybody looks."""
    it = Bench()
    it.clock.advance(3600)
    it.hear("trainer", "engine")
    it.wait(29)
    assert it.kills == []
    it.wait(3)
    assert it.kills == it.holders


@pytest.mark.asyncio
@pytest.mark.parametrize(("lease_s", "looks"), [(3600.0, 60), (30.0, 600), (0.0, 0)])
async def test_however_long_a_lease_is_its_holders_are_looked_at_every_minute(
    lease_s: float, looks: int, monkeypatch: pytest.MonkeyPatch
):
    it, looked = Bench(lease_s), list[float]()

    async def sleep(seconds: float) -> None:
        it.clock.advance(seconds)
        if it.clock.seconds > 3700.0:
            raise TimeoutError

    monkeypatch.setattr(anyio, "sleep", sleep)
    monkeypatch.setattr(it.leases, "look", lambda: looked.append(it.clock.seconds))
    with contextlib.suppress(TimeoutError):
        await it.leases.run()
    assert len(looked) == looks


def test_heartbeats_follow_from_the_lease():
    assert heartbeat_s(30.0) == 1.0
    assert heartbeat_s(2.0) == 0.4

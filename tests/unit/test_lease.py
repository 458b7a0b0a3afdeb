"""lease: who was silent for too long, and who only seems to be."""

from __future__ import annotations

from artd.lease import Holder, Leases, heartbeat_s
from tests.fakes.rows import FakeClock


class Bench:
    """A trainer and an engine that owe heartbeats, and the orders that were given."""

    def __init__(self, lease_s: float = 30.0) -> None:
        self.clock = FakeClock()
        self.holders = [Holder("trainer", 1), Holder("engine", 4)]
        self.kills: list[tuple[str, int]] = []
        self.leases = Leases(self.clock, lease_s, lambda: self.holders, self.kill)

    def kill(self, name: str, reason: str, spawn: int) -> None:
        assert "silent" in reason
        self.kills.append((name, spawn))

    def wait(self, seconds: float, *heard: str) -> None:
        """Time passes, watched; those who are named send something every second."""
        for _ in range(int(seconds)):
            self.clock.advance(1.0)
            for holder in self.holders:
                if holder.name in heard:
                    self.leases.heard(*holder)
            self.leases.look()


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
    it.leases.heard("trainer", 1)  # an old one that was let go
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


def test_heartbeats_follow_from_the_lease():
    assert heartbeat_s(30.0) == 1.0
    assert heartbeat_s(2.0) == 0.4

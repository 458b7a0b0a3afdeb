"""patience: whom a crowd of connections drops, and whom it never does."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from artd_workers.gateway.http.patience import GRACE_S, Crowd
from artd_workers.gateway.limits import Limits


class Waiting:
    """A connection that has sent nothing yet. loop.time(): the test's."""

    def __init__(self, crowd: Crowd, clock: list[float], address: str = "127.0.0.1") -> None:
        self.crowd, self.address, self.dropped = crowd, address, False
        self.loop = SimpleNamespace(time=lambda: clock[0])
        crowd.wait(self)

    def drop(self) -> None:
        self.dropped = True
        self.crowd.end_wait(self)


@pytest.fixture
def crowd() -> Crowd:
    return Crowd(Limits(heads=8), 1000)


def test_connections_that_came_in_one_turn_of_the_loop_are_not_dropped_for_each_other(crowd: Crowd) -> None:
    """As after a restart of the gateway, when hundreds wait in the listener's queue: nobody has read yet what they sent."""
    clock = [10.0]
    burst = [Waiting(crowd, clock) for _ in range(200)]
    assert not any(one.dropped for one in burst)


def test_silent_ones_make_room_once_they_had_time_to_speak(crowd: Crowd) -> None:
    clock = [10.0]
    silent = [Waiting(crowd, clock, "10.0.0.9") for _ in range(20)]
    clock[0] += GRACE_S
    late = Waiting(crowd, clock)
    assert not late.dropped and sum(not one.dropped for one in silent) == 7
    assert all(one.dropped for one in silent[:13]), "the oldest go first"

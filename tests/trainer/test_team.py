"""What rank 0 and another rank say about pushes, in one process: no order waits for ever, and none is taken for another's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from artd_schema.wire.direct import Feed
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.direct import member, team
from artd_workers.trainer.push.direct import pair as pair_module
from artd_workers.trainer.push.direct.feeder import Aborted
from artd_workers.trainer.push.direct.member import Member
from artd_workers.trainer.push.direct.pair import DirectWay
from artd_workers.trainer.push.direct.team import (
    Abort,
    Answer,
    Close,
    Ended,
    Give,
    Open,
    Opened,
    Order,
    PeerParts,
    Team,
)
from artd_workers.trainer.push.direct.weight_lock import WeightLock
from artd_workers.trainer.push.ways import Unable
from tests.awake import wait_until

pytestmark = pytest.mark.torch
FEED = Feed(pid=1, ticks=1, segments=(), units=())


class Script:
    """Another rank that answers as it is told to. heard: orders."""

    def __init__(self, say: Callable[[Order], list[Answer]]) -> None:
        self.team, self.heard, self._say = Team(), list[Order](), say
        self.team.lines = {1: self}
        self.failed = threading.Event()
        self.others = self.team.pair("p", self.failed.set)

    def send(self, data: bytes) -> None:
        order = msgspec.msgpack.decode(data, type=Order)
        self.heard.append(order)
        for answer in self._say(order):
            self.team.take(1, msgspec.msgpack.encode(answer))


def obedient(order: Order) -> list[Answer]:
    if isinstance(order, Open):
        return [Opened("p", FEED)]
    return [Ended("p", order.fence)] if isinstance(order, Give) else []


def ready(say: Callable[[Order], list[Answer]]) -> tuple[Script, PeerParts]:
    script = Script(lambda order: [Opened("p", FEED)] if isinstance(order, Open) else say(order))
    script.others.begin()
    assert script.others.await_feeds() == (FEED,)
    return script, script.others


def test_a_push_has_ended_when_all_have() -> None:
    script, others = ready(obedient)
    others.give(3, 7, Deadline(5.0))
    assert others.await_end(5.0) == "" and not script.failed.is_set()
    assert isinstance(script.heard[1], Give) and (script.heard[1].version, script.heard[1].fence) == (3, 7)


def test_an_answer_to_another_push_counts_for_nothing() -> None:
    _, others = ready(lambda order: [Ended("p", 6), Ended("q", 7), Opened("p", FEED)])
    others.give(3, 7, Deadline(5.0))
    with pytest.raises(TimeoutError, match="rank 1 did not end its part of push fence 7"):
        others.await_end(0.01)


def test_one_that_cannot_is_named() -> None:
    script = Script(lambda order: [Opened("p", None, "no memory")])
    script.others.begin()
    with pytest.raises(Unable, match="rank 1: no memory"):
        script.others.await_feeds()
    assert script.failed.is_set()


def test_one_that_is_silent_or_told_to_stop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script(lambda order: [])
    script.others.begin()
    threading.Timer(0.05, script.others.abort).start()
    with pytest.raises(Aborted, match="only 0 of 1"):
        script.others.await_feeds()
    assert script.heard == [Open("p"), Abort("p")]
    monkeypatch.setattr(team, "OPEN_S", 0.01)
    with pytest.raises(Aborted):
        Script(lambda order: []).others.await_feeds()


def test_one_that_dies_ends_the_push_and_takes_no_other() -> None:
    script, others = ready(lambda order: [])
    others.give(1, 2, Deadline(5.0))
    script.team.take(1, None)
    assert others.await_end(5.0) == "rank 1: its process has ended" and script.failed.is_set()
    with pytest.raises(Aborted, match="has ended"):
        others.give(1, 3, Deadline(5.0))
    later = script.team.pair("later", lambda: None)
    later.begin()
    with pytest.raises(Unable, match="has ended"):
        later.await_feeds()


def test_an_error_is_there_when_the_end_is() -> None:
    """Whoever waits for the end must not see it before what went wrong."""
    script, others = ready(lambda order: [Ended("p", 2, "Stale: older")] if isinstance(order, Give) else [])
    found = []
    waiter = threading.Thread(target=lambda: found.append(others.await_end(5.0)))
    others._busy = {1}
    waiter.start()
    others.give(1, 2, Deadline(5.0))
    waiter.join()
    assert found == ["rank 1: Stale: older"] and script.failed.is_set()


# ---- rank 0's own part beside theirs -----------------------------------------------------------------------------------


class Own:
    """Rank 0's giver: feeds until it is told how that ends."""

    def __init__(self) -> None:
        self.end, self.aborted = threading.Event(), threading.Event()

    def feed(self, fence: int, deadline: Deadline) -> None:
        while not self.end.wait(0.005):
            if self.aborted.is_set() or deadline.passed:
                raise Aborted("own") if self.aborted.is_set() else TimeoutError("own")

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    """A pair that has been offered; `say` gives rank 1's answer to its push of fence 2."""
    script = Script(lambda order: [Opened("p", FEED)] if isinstance(order, Open) else [])
    direct, own = DirectWay(str(tmp_path / "p")), Own()
    direct._local = own
    script.team.pair("p", lambda: None)
    others = direct._peers = script.team.pair("p", direct.abort)
    others.begin()
    others.await_feeds()

    def send(seconds: float = 30.0) -> None:
        message, snapshot = SimpleNamespace(fence=2), SimpleNamespace(version=1)
        direct.send(message, snapshot, Deadline(seconds))

    def say(error: str = "") -> None:
        wait_until(lambda: others._busy)
        script.team.take(1, msgspec.msgpack.encode(Ended("p", 2, error)))

    return SimpleNamespace(script=script, own=own, send=send, say=say)


def test_a_push_is_over_when_that_of_all_is(pair: Any) -> None:
    pair.own.end.set()
    over = threading.Event()
    thread = threading.Thread(target=lambda: (pair.send(), over.set()))
    thread.start()
    assert not over.wait(0.1)
    pair.say()
    thread.join(30.0)
    assert over.is_set() and not any(isinstance(order, Abort) for order in pair.script.heard)


def test_a_rank_that_fails_ends_the_others(pair: Any) -> None:
    threading.Thread(target=lambda: pair.say("DeviceError: gone")).start()
    with pytest.raises(Aborted, match="rank 1: DeviceError: gone"):
        pair.send()
    assert pair.own.aborted.is_set() and Abort("p") in pair.script.heard


def test_what_fails_here_ends_the_others_and_is_told_as_it_is(pair: Any) -> None:
    pair.script._say = lambda order: [Ended("p", 2, "Aborted: x")] if pair.script.heard.count(Abort("p")) == 1 else []
    with pytest.raises(TimeoutError, match="own"):
        pair.send(0.05)
    assert Abort("p") in pair.script.heard


def test_a_rank_that_never_ends_is_not_waited_for(pair: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_module, "END_S", 0.05)
    pair.own.end.set()
    with pytest.raises(TimeoutError, match="rank 1 did not end"):
        pair.send(0.05)
    assert Abort("p") in pair.script.heard


# ---- the other rank ---------------------------------------------------------------------------------------------------


class Slow:
    """A giver that waits, until it is aborted."""

    made: ClassVar[list[Slow]] = []

    def __init__(self, folder: Path) -> None:
        self.folder, self.aborted, self.closed = folder, threading.Event(), threading.Event()
        Slow.made.append(self)

    def open(self, weight_source: Any) -> Feed:
        return FEED

    def feed(self, fence: int, deadline: Deadline) -> None:
        assert self.aborted.wait(30.0) and not self.closed.is_set()
        raise Aborted("over")

    def abort(self) -> None:
        self.aborted.set()

    def close(self) -> None:
        self.closed.set()


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Says what it answers."""
    monkeypatch.setattr(member, "LocalPart", Slow)
    Slow.made.clear()
    weight_lock, said = WeightLock({}), []
    made = Member(
        3,
        SimpleNamespace(weight_lock=weight_lock, device=torch.device("cpu")),
    )
    made.line = SimpleNamespace(send=lambda data: said.append(msgspec.msgpack.decode(data, type=Answer)))
    return SimpleNamespace(
        weight_lock=weight_lock, said=said, tell=lambda order: made.take(msgspec.msgpack.encode(order)), end=made.take
    )


def test_abort_comes_through_while_a_push_is_fed(peer: Any) -> None:
    peer.tell(Open("/x/direct-1"))
    peer.tell(Give("/x/direct-1", 0, 5, 10.0))
    wait_until(lambda: peer.weight_lock._reader)
    peer.tell(Abort("/x/direct-1"))
    wait_until(lambda: len(peer.said) == 2)
    assert peer.said == [Opened("/x/direct-1", FEED), Ended("/x/direct-1", 5, "Aborted: over")]
    assert Slow.made[0].folder == Path("/x/direct-1.3")
    peer.tell(Close("/x/direct-1"))
    assert Slow.made[0].closed.wait(30.0)


def test_another_version_is_not_fed(peer: Any) -> None:
    peer.tell(Open("/x/p"))
    peer.weight_lock.renew(4)
    peer.tell(Give("/x/p", 3, 5, 10.0))
    wait_until(lambda: len(peer.said) == 2)
    assert "Stale" in peer.said[1].error


@pytest.mark.parametrize("how", ["closed", "rank 0 has ended"])
def test_what_is_fed_ends_before_its_page_goes(peer: Any, how: str) -> None:
    peer.tell(Open("/x/p"))
    peer.tell(Give("/x/p", 0, 5, 10.0))
    wait_until(lambda: peer.weight_lock._reader)
    peer.tell(Close("/x/p")) if how == "closed" else peer.end(None)
    assert Slow.made[0].closed.wait(30.0)
    assert peer.said[1].error == "Aborted: over"

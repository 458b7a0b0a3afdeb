"""Pushes over NCCL as the daemon orders them: a trainer's worker and an engine's session, over a plain connection; then the real
`Nccl` over `tests/fakes/nccl.c`, whose messages go through a pipe and any of which can be never done, hang, or fail.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines.pull.nccl_feed import Receiver
from artd_workers.trainer.push.direct.sender import Sender
from artd_workers.transfer.contracts import PullError
from artd_workers.transfer.nccl.communicator import Library, NcclError
from artd_workers.transfer.nccl.connection import Nccl
from tests.awake import wait_until
from tests.compiled import library
from tests.direct_rig import MemoryPort
from tests.plain_wire import PlainWire

from .test_push_direct import Bench, grouped, small
from .test_stock import FAILS, FAILS_LATER, FAKE, FINE, HANGS, ID, INIT, NEVER, PATIENCE_S

__all__ = ["grouped", "small"]
pytestmark = pytest.mark.torch
SEND, RECV = 3, 4
SHORT_S = 2.0
"""For what must be ended, after what must go well before it."""


# ---- as the daemon orders them ------------------------------------------------------------------------------------------


@pytest.fixture
def bench(tmp_path: Path, toy_folders: dict[str, Path], grouped: None) -> Bench:
    return Bench(tmp_path, toy_folders["moe"])


def served(bench: Bench, ref: w.CheckpointRef, engine: Any) -> bool:
    """A whole push."""
    number = bench.push(ref, engine, transfer="nccl")
    engine.pull(ref, number)
    bench.ended()
    return engine.holds(ref, bench.spec)


def test_steps_reach_two_engines(bench: Bench) -> None:
    first, second = bench.engine("first"), bench.engine("second", turned=True)
    zero = bench.desk.commit(0, None)
    assert served(bench, zero, first)
    one = bench.desk.commit(1, zero)
    assert served(bench, one, first) and not first.holds(zero, bench.spec)
    assert (first.meeting.stat().st_mode & 0o777, sorted(path.name for path in first.meeting.iterdir())) == (
        0o700,
        ["offer"],
    )
    assert len(wires(bench)) == 1, "both went over one connection"
    assert served(bench, one, second)
    wait_until(lambda: wires(bench)[0].watchdog.bitten.is_set())
    assert served(bench, bench.desk.commit(2, one), second)
    assert len(wires(bench)) == 2 and bench.ear.said == [m for m in bench.ear.said if not isinstance(m, w.Refused)]


def wires(bench: Bench) -> list[PlainWire]:
    """The trainer's ends."""
    port = bench.desk.trainer._port
    assert isinstance(port, MemoryPort)
    return port.wires


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_full_parameters(tmp_path: Path, toy_folders: dict[str, Path], dtype: str) -> None:
    bench = Bench(tmp_path, toy_folders["qwen3"], parameters="full", dtype=dtype)
    assert served(bench, bench.desk.commit(1, bench.desk.commit(0, None)), bench.engine("engine"))


def test_an_engine_that_is_not_met_is_not_tried_this_way_again(bench: Bench) -> None:
    """One GPU for both, or another NCCL."""
    zero = bench.desk.commit(0, None)
    refused = bench.refused(bench.push(zero, bench.engine("engine"), transfer="nccl", deadline_s=0.2, drain_s=0.0))
    assert refused.transfer == "nccl" and "not met over NCCL" in refused.reason


def test_a_machine_without_nccl_is_refused_by_name(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def wire(_: MemoryPort) -> PlainWire:
        raise NcclError("libnccl.so.2 cannot be loaded")

    monkeypatch.setattr(MemoryPort, "wire", wire)
    zero, engine = bench.desk.commit(0, None), bench.engine("engine")
    refused = bench.refused(bench.push(zero, engine, transfer="nccl"))
    assert refused.transfer == "nccl" and "cannot be loaded" in refused.reason
    assert not (engine.meeting / "offer").exists()


def test_what_cannot_be_planned_or_is_a_copy_is_refused(bench: Bench, tmp_path: Path) -> None:
    zero, gone = bench.desk.commit(0, None), bench.engine("gone")
    (gone.meeting.parent / "table").unlink()
    refused = bench.refused(bench.push(zero, gone, transfer="nccl"))
    assert refused.transfer == "nccl" and "table is missing" in refused.reason


def test_the_daemons_end_of_a_push_ends_it_and_its_connection(bench: Bench) -> None:
    """The engine has taken some; it cannot see the trainer's end, so the daemon is told."""
    engine = bench.engine("engine")
    zero = bench.desk.commit(0, None)
    assert served(bench, zero, engine)
    one = bench.desk.commit(1, zero)
    number = bench.push(one, engine, transfer="nccl", deadline_s=60.0)
    wait_until(lambda: wires(bench)[0].log[-1][0] == "send" and bench.worker._pusher._running)
    bench.worker._take(w.PushEnd(push=number, fence=number), [])
    said = bench.refused(number)
    assert said.transfer is None and "the push has ended" in said.reason
    assert "failed before" in bench.refused(bench.push(one, engine, transfer="nccl")).reason
    with pytest.raises(PullError):
        engine.pull(one, number, 0.3)


def test_training_goes_on_when_an_engine_takes_nothing(bench: Bench) -> None:
    """The next job's stage waits for the push's deadline, then ends it."""
    engine = bench.engine("engine")
    zero = bench.desk.commit(0, None)
    assert served(bench, zero, engine)
    bench.push(zero, engine, transfer="nccl", deadline_s=0.3, drain_s=0.1)
    bench.desk.commit(1, zero)
    bench.ended()
    assert wires(bench)[0].reason


# ---- NCCL itself, scripted ------------------------------------------------------------------------------------------------


class Fake(Library):
    """The fake libnccl and its script."""

    def __init__(self) -> None:
        path = str(library(FAKE))
        super().__init__(path)
        self._fake = ctypes.CDLL(path)
        self._before = self._fake.fake_aborts()
        for step in (INIT, SEND, RECV):
            self.script(step, FINE)
        self.ends = os.pipe()
        self._fake.fake_pipe(*self.ends)

    def script(self, step: int, way: int, well: int = 0) -> None:
        self._fake.fake_script(step, way, well, -1)

    @property
    def aborts(self) -> int:
        return self._fake.fake_aborts() - self._before

    def close(self) -> None:
        self._fake.fake_pipe(-1, -1)
        for end in self.ends:
            os.close(end)


@pytest.fixture
def fake() -> Iterator[Fake]:
    one = Fake()
    yield one
    one.close()


@pytest.fixture
def two(fake: Fake) -> Iterator[tuple[Nccl, Nccl]]:
    """The trainer's end and the engine's."""
    ends = Nccl(torch.device("cpu"), fake), Nccl(torch.device("cpu"), fake)
    yield ends
    for end in ends:
        end.close()


def met(two: tuple[Nccl, Nccl]) -> None:
    for rank, end in enumerate(two):
        with end.within(PATIENCE_S):
            assert end.name() == ID
            end.join(ID, rank)


def test_pushes_over_nccls_calls(
    tmp_path: Path, toy_folders: dict[str, Path], fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Nccl] = []
    monkeypatch.setattr(MemoryPort, "wire", lambda _: made.append(Nccl(torch.device("cpu"), fake)) or made[-1])
    bench = Bench(tmp_path, toy_folders["qwen3"])
    engine = bench.engine("engine")
    zero = bench.desk.commit(0, None)
    assert served(bench, zero, engine) and served(bench, bench.desk.commit(1, zero), engine)
    assert len(made) == 2 and fake.aborts == 0 and all(end.joined for end in made)
    engine.session.close()
    for pair in bench.worker._pusher._pairs.values():
        pair.retire()
    wait_until(lambda: fake.aborts == 2)


STEPS = {INIT: "ncclCommInitRankConfig", SEND: "ncclSend", RECV: "ncclRecv"}
WORDS = {NEVER: f"not done within {SHORT_S} s", HANGS: "(3)", FAILS: "system error", FAILS_LATER: "remote"}


@pytest.mark.parametrize("way", WORDS)
@pytest.mark.parametrize("step", STEPS)
def test_whatever_nccl_does_each_side_ends_by_its_deadline(
    fake: Fake, two: tuple[Nccl, Nccl], step: int, way: int
) -> None:
    """At the meeting, and in the middle of a push."""
    fake.script(step, way)
    end, rank = (two[1], 1) if step == RECV else (two[0], 0)
    if step == RECV:
        os.write(fake.ends[1], bytes(8))
    limit = SHORT_S if way in (NEVER, HANGS) else PATIENCE_S
    with pytest.raises(NcclError, match=STEPS[step]) as error, end.within(limit):
        end.join(ID, rank)
    assert WORDS[way] in str(error.value)
    assert fake.aborts == 1 and end.reason and not end.joined
    with pytest.raises(NcclError, match="was aborted"), end.within(1.0):
        raise AssertionError


@pytest.mark.parametrize("way", WORDS)
def test_a_send_that_goes_wrong_ends_the_feed(fake: Fake, two: tuple[Nccl, Nccl], way: int) -> None:
    met(two)
    fake.script(SEND, way, well=2)
    sender = Sender(two[0], [64, 64, 64], [torch.zeros(64, dtype=torch.uint8)])
    with pytest.raises(NcclError, match="ncclSend"), two[0].within(SHORT_S if way in (NEVER, HANGS) else PATIENCE_S):
        sender.begin(7)
        sender.ready = 3
    assert fake.aborts == 1


@pytest.mark.parametrize("way", WORDS)
def test_a_receive_that_goes_wrong_ends_the_pull(fake: Fake, two: tuple[Nccl, Nccl], way: int) -> None:
    met(two)
    fake.script(RECV, way, well=2)
    ring = torch.zeros(64, dtype=torch.uint8)
    receiver = Receiver(two[1], [64, 64, 64], [ring.data_ptr()])
    with two[0].within(PATIENCE_S):
        sender = Sender(two[0], [64, 64, 64], [torch.ones(64, dtype=torch.uint8)])
        sender.begin(7)
        sender.ready = 3
    limit = Deadline(SHORT_S if way in (NEVER, HANGS) else PATIENCE_S)
    with pytest.raises(PullError, match="ncclRecv"), receiver.take(7, limit):
        while receiver.fence != 7 or not receiver.ready:
            time.sleep(0.001)
        assert ring.sum() == 64
        receiver.done = 1
        while receiver.ready < 2:
            time.sleep(0.001)
    assert fake.aborts == 1 and two[1].reason


def test_what_an_abort_has_ended_does_not_count_as_received(fake: Fake, two: tuple[Nccl, Nccl]) -> None:
    """NCCL's kernels come to their end when they are aborted: the queue then looks as if the message were there."""
    met(two)
    receiver = Receiver(two[1], [64], [torch.zeros(64, dtype=torch.uint8).data_ptr()])
    receiver._header.zero_()
    fake._fake.fake_pipe(-1, -1)  # from now on whatever is called is done at once
    two[1].check = partial(_aborted_after, two[1].check, threading.Event())
    with pytest.raises(PullError, match="aborted"), receiver.take(0, Deadline(PATIENCE_S)):
        assert receiver.fence == 0
    assert receiver._fence == -1 and receiver._posted == 0


def _aborted_after(check: Any, asked: threading.Event) -> None:
    """The second look finds the communicator aborted."""
    if asked.is_set():
        raise NcclError("aborted meanwhile")
    asked.set()
    check()

"""A server whose engine is dead is ended, and no other: what it says is counted, and what nobody says is not."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError, EngineTimeout
from artd_workers.engines.http import call
from artd_workers.engines.process import health
from tests.awake import SOON_S, Awake
from tests.engine.conftest import Bench

FINE, NO, SILENT = None, EngineError("no"), EngineTimeout("nothing")
NOTICED_S = 15.0


def looks(*answers: EngineError | None) -> tuple[str, int]:
    """What is found from these answers, after which it is over; how many were asked for."""
    over, asked = threading.Event(), 0

    def ask() -> None:
        nonlocal asked
        answer = answers[asked]
        asked += 1
        if asked == len(answers):
            over.set()
        if answer is not None:
            raise answer

    return health.await_loss(ask, over, every_s=0.0), asked


@pytest.mark.parametrize(
    ("answers", "found", "asked"),
    [
        ((FINE, NO, NO, FINE, NO, NO, NO, FINE), "no", 7),
        ((NO, NO, FINE, NO, NO), "", 5),
        ((NO, NO, SILENT, NO, NO, SILENT), "", 6),
        ((SILENT,) * 20, "", 20),
    ],
    ids=["three times", "not in a row", "silent between", "silent"],
)
def test_what_it_says_three_times_in_a_row_counts(
    answers: tuple[EngineError | None, ...], found: str, asked: int
) -> None:
    assert looks(*answers) == (found, asked)


def test_a_server_that_takes_no_connections_says_nothing(tmp_path: Path) -> None:
    """It is stopped or busy, and as many as may wait do."""
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as waits:
        server.bind(path)
        server.listen(0)
        waits.connect(path)
        with pytest.raises(EngineTimeout):
            call(path, "GET", "/health", deadline=Deadline(0.2))


def test_an_engine_that_dies_between_pushes_is_told(bench: Bench) -> None:
    with bench.start() as daemon:
        daemon.ready()
        with Awake() as took:
            strike(bench, signal.SIGKILL, lambda pid: pid != server(bench))
            down = daemon.expect(w.Down)
        assert took.seconds < NOTICED_S
        assert "its engine has died (GET /health: status 503)" in down.error
        assert daemon.wait() == 1
    assert not bench.processes()


def test_a_push_that_waits_for_a_dead_engine_fails_where_it_waits(bench: Bench) -> None:
    bench.script = {"faults": {"artd_load_merged": str(bench.root / "go")}}
    with bench.start() as daemon:
        daemon.ready()
        daemon.send(bench.push(0, deadline_s=4 * SOON_S))
        daemon.expect(w.Pausing)
        while "artd_load_merged" not in bench.routes():
            daemon.hear(0.01)
        with Awake() as took:
            strike(bench, signal.SIGKILL, lambda pid: pid != server(bench))
            (bench.root / "go").touch()
            failed = daemon.expect(w.PushFailed)
        assert took.seconds < NOTICED_S
        assert failed.phase == "transfer"
        assert "its engine has died (GET /health: status 503)" in failed.error
        assert "its engine has died" in daemon.expect(w.Down).error
        assert daemon.wait() == 1


def test_a_server_that_is_stopped_for_long_serves_again(bench: Bench) -> None:
    """Longer than it takes to fill its queue of connections with unanswered looks."""
    with bench.start() as daemon:
        daemon.ready()
        strike(bench, signal.SIGSTOP, lambda pid: True)
        for _ in range(8):  # its queue is full
            with pytest.raises(EngineTimeout):
                call(f"{bench.config.dir}/s", "GET", "/metrics", deadline=Deadline(0.05))
        daemon.hear(2.0 + (health.LOOKS + 1) * health.LOOK_S)  # one look more than end a dead engine
        strike(bench, signal.SIGCONT, lambda pid: True)
        daemon.send(bench.push(0))
        daemon.expect(w.Live)


def server(bench: Bench) -> int:
    return int(Path(bench.config.log).read_text().split()[2])


def strike(bench: Bench, number: int, whom: Callable[[int], bool]) -> None:
    """Of the server's group."""
    for pid in bench.processes():
        if os.getpgid(pid) == server(bench) and whom(pid):
            os.kill(pid, number)

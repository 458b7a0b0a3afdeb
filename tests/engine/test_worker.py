"""The engine worker's push thread without processes: what it does between an answer and the next push."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from artd_schema.wire import worker as w
from artd_workers.engines.push import Pusher, PushError
from artd_workers.engines.worker import EngineWorker
from tests.awake import SOON_S
from tests.engine.conftest import Bench


class StubLink:
    """Calls `react` with every message, in the sender's thread: a daemon that answers at once."""

    def __init__(self) -> None:
        self.sent: list[w.FromWorker] = []
        self.react: Callable[[w.FromWorker], None] = lambda message: None

    def send(self, message: w.FromWorker, bulk: Any = ()) -> None:
        self.sent.append(message)
        self.react(message)


class StubPusher:
    """`result` gives what a push ends with."""

    phase = "transfer"

    def __init__(self, result: Callable[[w.Push], w.Live]) -> None:
        self.run = result


def live(push: w.Push) -> w.Live:
    return w.Live(push=push.push, fence=push.fence, max_abs=0.0, mean_abs=0.0)


def run(
    bench: Bench, result: Callable[[w.Push], w.Live], react: Callable[[EngineWorker, w.FromWorker], None]
) -> EngineWorker:
    """A worker whose push thread has got one live push and ended by `_broken` or by a failure."""
    bench.prepare()
    link = StubLink()
    worker = EngineWorker(link, bench.config)
    link.react = lambda message: react(worker, message)
    worker._take(bench.push(0, source="live"))
    pusher: Pusher = StubPusher(result)
    thread = threading.Thread(target=worker._push_all, args=(pusher,), daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert not thread.is_alive()
    return worker


def test_a_push_that_follows_an_answer_at_once_is_served(bench: Bench) -> None:
    seen: list[int] = []

    def react(worker: EngineWorker, message: w.FromWorker) -> None:
        seen.append(message.fence)  # type: ignore[union-attr]
        if len(seen) == 1:
            worker._take(bench.push(1, source="live"))
        else:
            assert worker._broken == ""
            worker._broken = "the test is over"

    run(bench, live, react)
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("error", "phase"), [(PushError("load", "no"), "load"), (ZeroDivisionError("odd"), "transfer")]
)
def test_any_failure_is_told_and_ends_the_pushes(bench: Bench, error: Exception, phase: str) -> None:
    def fail(push: w.Push) -> w.Live:
        raise error

    told: list[w.FromWorker] = []
    worker = run(bench, fail, lambda _, message: told.append(message))
    (failed,) = told
    assert isinstance(failed, w.PushFailed)
    assert (failed.phase, failed.fence) == (phase, 1)
    assert str(error) in failed.error
    assert failed.error in worker._broken

"""Requests in flight across a pause: what the adapter asks of a server for each way, and what it leaves alone afterwards."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from artd_schema.run.spec import InFlight
from artd_workers.deadline import Deadline
from artd_workers.engines.http import call
from artd_workers.engines.vllm import guard
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.awake import SOON_S
from tests.engine.conftest import Bench
from tests.fake_daemon import INSTANCE, SPAWN

TOKENS, MANY = 200, 10_000
"""2 s and 100 s of the scripted server."""
DRAINED = [("mode=wait", "clear_cache=true"), ("mode=abort", "clear_cache=true")]
KEPT = [("mode=keep", "clear_cache=false")]
DROPPED = [("mode=keep", "clear_cache=true")]


@pytest.fixture
def adapter(bench: Bench) -> Iterator[VllmAdapter]:
    with bench.serve():
        yield VllmAdapter(bench.root / "s", Deadline(SOON_S), guard.owner(INSTANCE, SPAWN))


def ask(bench: Bench, tokens: int) -> dict[str, Any]:
    body = {"model": "toy", "prompt": [[1, 2, 3]], "max_tokens": tokens}
    return call(str(bench.root / "s"), "POST", "/v1/completions", body, deadline=Deadline(2 * SOON_S))["choices"][0]


@contextmanager
def request(bench: Bench, adapter: VllmAdapter, tokens: int = TOKENS) -> Iterator[list[str]]:
    """A request in flight; yields a list that gets the reason of its end."""
    ended: list[str] = []
    thread = threading.Thread(target=lambda: ended.append(ask(bench, tokens)["finish_reason"]))
    thread.start()
    while not adapter.in_flight("toy", Deadline(SOON_S)):
        assert not ended
        time.sleep(0.005)
    try:
        yield ended
    finally:
        thread.join(2 * SOON_S)


def pauses(bench: Bench) -> list[tuple[str, ...]]:
    return [tuple(one["query"].split("&")) for one in bench.calls() if one["route"] == "/pause"]


@pytest.mark.parametrize(
    ("version", "in_flight", "asked"),
    [
        ("0.25.1", "keep", KEPT), ("0.25.1", "recompute", DROPPED), ("0.25.1", "drain", DRAINED),
        ("0.32.0", "keep", KEPT), ("0.32.0", "recompute", DROPPED),
    ],
)  # fmt: skip
def test_a_pause_does_to_requests_what_the_run_wants(
    bench: Bench, version: str, in_flight: InFlight, asked: list[tuple[str, ...]]
) -> None:
    bench.script = {"version": version}
    with bench.serve():
        adapter = VllmAdapter(bench.root / "s", Deadline(SOON_S), guard.owner(INSTANCE, SPAWN))
        with request(bench, adapter, MANY if asked is DRAINED else TOKENS) as ended:
            assert adapter.pause(0.05, Deadline(SOON_S), in_flight) is (asked is DRAINED)
            assert pauses(bench) == asked
            adapter.finish("toy@1", Deadline(SOON_S))
            adapter.resume(Deadline(SOON_S))
        assert ended == ["abort" if asked is DRAINED else "length"]
    (label,) = [one["body"]["kwargs"] for one in bench.calls() if one["route"] == "artd_label"]
    assert label == {"owner": guard.owner(INSTANCE, SPAWN), "name": "toy@1", "cleared": asked is not KEPT}
    assert ("/reset_prefix_cache" in bench.routes()) is (asked is not KEPT)


def test_a_kept_request_ends_only_after_the_pause(bench: Bench, adapter: VllmAdapter) -> None:
    with request(bench, adapter) as ended:
        adapter.pause(0.0, Deadline(SOON_S), "keep")
        time.sleep(1.5 * TOKENS * 0.01)
        assert ended == []
        adapter.resume(Deadline(SOON_S))
    assert ended == ["length"]


def test_only_the_last_pause_counts(bench: Bench, adapter: VllmAdapter) -> None:
    """A push from disk follows one that kept requests: it drops the prefixes again, of both."""
    for in_flight, cleared in (("keep", False), ("drain", True)):
        adapter.pause(0.0, Deadline(SOON_S), in_flight)
        adapter.finish("toy@1", Deadline(SOON_S))
        adapter.resume(Deadline(SOON_S))
        assert bench.calls()[-2 if not cleared else -3]["body"]["kwargs"]["cleared"] is cleared
    assert bench.routes().count("/reset_prefix_cache") == 1

"""An engine that computes nothing for its requests is ended; one that is slow, paused or has nothing to do is not."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from artd_schema.wire import worker as w
from artd_workers import daemon_link
from artd_workers.deadline import Deadline
from artd_workers.engines.process.progress import Standstill, Work, watch
from artd_workers.engines.vllm import guard
from artd_workers.engines.vllm.adapter import VllmAdapter
from artd_workers.engines.vllm.tokens.sample_book import SampleBook
from artd_workers.engines.vllm.work import read
from tests.awake import Awake
from tests.engine.conftest import Bench
from tests.engine.test_harness import request
from tests.engine.test_health import server, strike

STALL_S = 1.0


def found(*looks: Work | None, limit_s: float = 10.0) -> str:
    """What is found of these, which are 4 s apart."""
    standstill = Standstill(limit_s)
    return next(filter(None, (standstill.look(work, 4.0) for work in looks)), "")


ONE, TWO = Work(3, "1"), Work(3, "2")


@pytest.mark.parametrize(
    ("looks", "ended"),
    [
        ([ONE, ONE, ONE, ONE], True),
        ([ONE, ONE, ONE, TWO, TWO, TWO], False),
        ([ONE, ONE, ONE, Work(0, "1"), ONE, ONE, ONE], True),
        ([ONE, ONE, Work(0, "1"), ONE, ONE], False),
        ([Work(0, "1")] * 9, False),
        ([Work(3, "1", asleep=True)] * 9, False),
        ([None] * 3, True),
        ([ONE, None, TWO, None, None, TWO], True),
        ([ONE, None, TWO, None, ONE], False),
    ],
)
def test_what_stands_still_for_too_long_is_ended(looks: list[Work | None], ended: bool) -> None:
    assert bool(found(*looks)) == ended


def test_a_push_is_a_reason_to_stand_still() -> None:
    standstill = Standstill(10.0)
    assert not any(standstill.look(ONE, 4.0) for _ in range(3))
    standstill.reset()
    assert not any(standstill.look(ONE, 4.0) for _ in range(3))


PAGE = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="toy"}} {tokens}
vllm:generation_tokens_created{{engine="0",model_name="toy"}} 1.7e+09
vllm:prompt_tokens_total{{engine="0",model_name="toy"}} 12.0
vllm:kv_cache_usage_perc{{engine="0",model_name="toy"}} {cache}
vllm:num_requests_running{{engine="0",model_name="toy"}} {running}
vllm:num_requests_waiting{{engine="0",model_name="toy"}} 1.0
vllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 1.0
vllm:engine_sleep_state{{engine="0",sleep_state="awake"}} {awake}
vllm:engine_sleep_state{{engine="0",sleep_state="weights_offloaded"}} 0.0
"""


def page(tokens: float = 5.0, cache: float = 0.1, running: float = 2.0, awake: float = 1.0) -> str:
    return PAGE.format(tokens=tokens, cache=cache, running=running, awake=awake)


def test_the_marks_of_vllms_metrics() -> None:
    plain = read(page(), 0)
    assert (plain.requests, plain.asleep) == (3, False)
    assert read(page(), 0).mark == plain.mark
    assert read(page(tokens=6.0), 0).mark != plain.mark
    assert read(page(cache=0.2), 0).mark != plain.mark  # a part of a long prompt, before its first token
    assert read(page(running=0.0), 7).requests == 7  # the engine has never answered
    assert read(page(awake=0.0), 0).asleep


@pytest.mark.asyncio
async def test_the_guard_counts_what_waits_for_the_engine() -> None:
    go, sent = asyncio.Event(), []

    async def app(*_: Any) -> None:
        await go.wait()

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        raise AssertionError("no body is read")

    made = guard.Guard(app)

    def call(path: str) -> Any:
        return made({"type": "http", "path": path, "headers": []}, receive, send)

    async def count() -> bytes:
        sent.clear()
        await call(guard.IN_FLIGHT)
        return sent[1]["body"]

    waiting = [asyncio.create_task(call(path)) for path in ("/inference/v1/generate", "/v1/completions", "/tokenize")]
    await asyncio.sleep(0)
    assert await count() == b'{"requests": 2}'
    waiting[0].cancel()
    await asyncio.wait(waiting[:1])
    assert await count() == b'{"requests": 1}'
    go.set()
    await asyncio.wait(waiting)
    assert await count() == b'{"requests": 0}'


def test_an_engine_that_is_stopped_with_requests_is_ended_and_an_idle_one_is_not(bench: Bench) -> None:
    bench.stall_s = STALL_S
    with bench.start() as daemon:
        socket = daemon.ready()
        strike(bench, signal.SIGSTOP, lambda pid: pid != server(bench))
        daemon.hear(2 * STALL_S)  # nothing to compute
        strike(bench, signal.SIGCONT, lambda pid: pid != server(bench))
        request(socket, 600.0)
        daemon.hear(2 * STALL_S)  # it computes
        strike(bench, signal.SIGSTOP, lambda pid: pid != server(bench))
        with Awake() as took:
            down = daemon.expect(w.Down)
        assert took.seconds < STALL_S + 10.0
        assert "computed no token for" in down.error and "while 1 requests waited" in down.error
        assert daemon.wait() == 1
    assert not bench.processes()


@pytest.mark.parametrize("pushing", [True, False])
def test_a_push_that_pauses_for_longer_than_the_limit_goes_on(pushing: bool) -> None:
    over = threading.Event()
    timer = threading.Timer(2.0, over.set)
    timer.start()
    why = watch(lambda: ONE, lambda: pushing, 0.2, over)
    timer.cancel()
    timer.join()
    assert bool(why) != pushing


def test_a_push_from_a_slow_disk_goes_on_as_long_as_tensors_come(bench: Bench) -> None:
    """A deadline of 1 s, and a load of 4 s that leaves marks."""
    go = bench.root / "go"
    bench.script = {"faults": {"artd_load_merged": str(go)}}
    with bench.start() as daemon:
        daemon.ready()
        push = bench.push(0, deadline_s=1.5)
        daemon.send(push)
        while "artd_load_merged" not in bench.routes():
            daemon.hear(0.01)
        for _ in range(20):
            (Path(bench.config.dir) / "t" / "loaded").touch()
            daemon.hear(0.2)
        go.touch()
        daemon.expect(w.Live)
    beats = {beat.progress for beat in daemon.beats if isinstance(beat, w.Beat) and beat.push == push.push}
    assert len(beats) >= 3  # the daemon heard of it, too


def test_the_tries_to_reset_the_cache_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of aborted requests come back a step later."""
    began, asked = time.monotonic(), []

    def call(_self: VllmAdapter, _method: str, route: str, *_: Any, **__: Any) -> Any:
        if route == "/version":
            return {"version": "0.32.0"}
        if route == "/collective_rpc":
            return {"results": [{}]}
        if route == "/reset_prefix_cache":
            asked.append(route)
            return {"success": time.monotonic() - began > 0.3}
        return {}

    monkeypatch.setattr(VllmAdapter, "_call", call)
    VllmAdapter(Path("/s"), Deadline(1.0), "i/1").finish("toy@1", Deadline(1.0))
    assert 2 <= len(asked) <= 6


def test_the_heartbeat_tells_the_memory_that_is_held_now() -> None:
    before = daemon_link.resident()
    block = bytearray(os.urandom(1)) * (64 << 20)
    held = daemon_link.resident()
    del block
    assert held - before > 48 << 20 and held - daemon_link.resident() > 48 << 20
    assert Path("/proc/self/statm").exists()


class Scheduled:
    """vLLM's SchedulerOutput, as far as the book reads it."""

    def __init__(self, new: list[str], finished: list[str]) -> None:
        self.finished_req_ids = finished
        self.scheduled_new_reqs = [type("New", (), {"req_id": each, "prompt_token_ids": [1]}) for each in new]
        self.scheduled_cached_reqs = type(
            "Cached", (), {"req_ids": [], "num_computed_tokens": [], "num_output_tokens": [], "resumed_req_ids": set()}
        )


def test_an_ended_choice_is_known_as_long_as_another_one_of_its_response_runs() -> None:
    book = SampleBook(ended=8)
    book.label("toy@1", cleared=False)
    zero, one = (f"{choice}_generate-tokens-slow-00c0ffee" for choice in (0, 1))
    book.step(Scheduled([zero, one], []))
    book.step(Scheduled([], [zero]))
    for number in range(100):
        book.step(Scheduled([f"generate-tokens-quick{number}-00c0ffee"], []))
        book.step(Scheduled([], [f"generate-tokens-quick{number}-00c0ffee"]))
    assert book.known <= 30  # it does not grow
    assert set(book.take(["slow#0", "slow#1", "quick0#0"])) == {"slow#0", "slow#1"}

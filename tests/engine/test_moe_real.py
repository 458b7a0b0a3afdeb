"""The engine worker with the real vLLM server on a toy Qwen3-MoE with one dense layer: one server start, every weight pushed.

Expected values are Hugging Face's: canaries by `make_checkpoint.py`, experts of every token by `routes_reference.py`. The cache
holds 1,024 tokens, so that requests are preempted. Tests share the server and run in order.
"""

from __future__ import annotations

import base64
import json
import random
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artd_schema.data.trajectory import RouteShape
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.http import call
from tests.engine.real import Engine, HuggingFace, Sender, load, start

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
SHAPE = RouteShape(layers=2, topk=2, experts=8)
EXACT = 1e-5  # nats, fp32
CLEAR = 1e-5  # logits: closer than this, two right programs may choose either expert
Json = dict[str, Any]


class Reference(HuggingFace):
    def compare(self, told: Sequence[tuple[list[int], Json, Json]]) -> int:
        """Logprobs and routes of (prompt, choice, taken) against Hugging Face's; returns rows x layers."""
        answers = self.ask([prompt + choice["token_ids"] for prompt, choice, _ in told])
        return sum(same(*one, answer) for one, answer in zip(told, answers, strict=True))


def same(prompt: list[int], choice: Json, taken: Json, answer: Json) -> int:
    """Assert that a choice with its routes is what Hugging Face answers; returns rows x layers."""
    got = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(got, answer["logprobs"][len(prompt) - 1 :], rtol=0, atol=EXACT)
    count = len(prompt) + len(choice["token_ids"]) - 1
    assert (taken["start"], taken["rows"]) == (0, count)
    rows = np.frombuffer(base64.b64decode(taken["routes"]), "u1").reshape(count, SHAPE.layers, SHAPE.topk)
    equal = (rows == np.array(answer["chosen"])[:count]).all(-1)
    clear = np.array(answer["margin"])[:count] > CLEAR
    assert (equal | ~clear).all(), f"token, layer {np.argwhere(clear & ~equal)[0]}"
    assert clear.mean() > 0.99
    return equal.size


@pytest.fixture(scope="module")
def reference(moe_toys: Path) -> Iterator[Reference]:
    """Made before the engine, so that both start at once."""
    made = Reference(moe_toys, "f0")
    yield made
    made.close()


@pytest.fixture(scope="module")
def engine(moe_toys: Path, reference: Reference) -> Iterator[Engine]:
    yield from start(moe_toys, "merged", "full", SHAPE, kv_cache_mib=2)


def test_every_weight_goes_in_from_disk_and_live_time_and_again(engine: Engine) -> None:
    """`live` holds each canary to Hugging Face's logprobs. Stock vLLM is right after its first load only."""
    assert engine.live(engine.push("f0")).max_abs <= EXACT
    sender = Sender(engine, "first")
    try:
        for step in ("f1", "f0", "f1"):
            sender.order(step)
            assert engine.live(engine.push(step, source="live", rendezvous=sender.rendezvous)).max_abs <= EXACT
            sender.sent()
    finally:
        sender.close()
    assert engine.live(engine.push("f0")).max_abs <= EXACT


def test_routes_are_those_of_hugging_face_at_every_position(engine: Engine, reference: Reference) -> None:
    pairs = generate_many(engine, "r", [5 + 7 * i for i in range(12)], max_tokens=20)
    taken = take(engine, [f"r{i}" for i in range(12)])
    assert sorted(taken) == sorted(f"r{i}#0" for i in range(12))
    assert take(engine, ["r0", "r1"]) == {}, "what was taken is gone"
    assert reference.compare([(*pair, taken[f"r{i}#0"]) for i, pair in enumerate(pairs)]) == 1500
    assert all(found["recomputed"] == [] for found in taken.values())


def test_each_of_three_choices_has_its_own(engine: Engine, reference: Reference) -> None:
    prompt = [7, 8, 9, 10] * 3
    choices = generate(engine, "n", prompt, n=3, max_tokens=15, seed=3)
    taken = take(engine, ["n"])
    assert sorted(taken) == ["n#0", "n#1", "n#2"]
    assert len({found["routes"] for found in taken.values()}) == 3
    reference.compare([(prompt, choice, taken[f"n#{choice['index']}"]) for choice in choices])


def test_a_warm_up_leaves_answers_routes_and_counters_as_they_are(engine: Engine, reference: Reference) -> None:
    """On a CPU there is nothing to compile, but the dummy steps are those of a GPU."""
    prompt = list(range(30, 130))

    def answer(request: str) -> tuple[Json, Json]:
        (choice,) = generate(engine, request, prompt, max_tokens=20, seed=5)
        return choice, take(engine, [request])[f"{request}#0"]

    before, counters = answer("w0"), metrics(engine)
    done = rpc(engine, "artd_warm", timeout_s=60.0)
    assert done["run"] == done["forms"] >= 10 and done["kernels"] == 0
    assert metrics(engine) == counters
    assert answer("w1") == before
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(generate_many, engine, "v", [20 + 9 * i for i in range(6)], max_tokens=90)
        while not running.done() and held(engine)["sequences"] < 6:
            time.sleep(0.01)
        rpc(engine, "artd_warm", timeout_s=60.0)
        assert not running.done(), "the requests were to be under way"
        pairs = running.result()
    taken = take(engine, [f"v{i}" for i in range(6)])
    reference.compare([(*pair, taken[f"v{i}#0"]) for i, pair in enumerate(pairs)])


def test_a_preempted_request_has_each_row_once(engine: Engine, reference: Reference) -> None:
    pairs = generate_many(engine, "p", [100 + i for i in range(10)], max_tokens=150)
    taken = take(engine, [f"p{i}" for i in range(10)])
    spans = [found["recomputed"] for found in taken.values() if found["recomputed"]]
    assert len(spans) >= 2, "the cache is too large for this test: nothing was preempted"
    assert all(first == 0 and 100 < end < 260 for ((first, end),) in spans)
    reference.compare([(*pair, taken[f"p{i}#0"]) for i, pair in enumerate(pairs)])


def test_a_stop_string_may_be_found_after_further_tokens(engine: Engine) -> None:
    """The API server finds it, and the engine went on meanwhile: rows follow that belong to no token of the response."""
    (choice,) = generate(engine, "s", [7, 8, 9], max_tokens=100, stop=["e"], seed=1)
    assert choice["finish_reason"] == "stop"
    assert take(engine, ["s"])["s#0"]["rows"] >= 3 + len(choice["token_ids"]) - 1


def test_nothing_is_held_of_a_thousand_aborted_requests(engine: Engine) -> None:
    rng = random.Random(4)
    plan = [(f"a{i}", rng.random() * 0.1, rng.random() < 0.5) for i in range(1000)]
    peak = 0
    with ThreadPoolExecutor(24) as pool:
        running = [pool.submit(abort, engine, *one) for one in plan]
        while not all(one.done() for one in running):
            peak = max(peak, held(engine)["sequences"])
            time.sleep(0.05)
        for one in running:
            one.result()
    assert peak > 0, "none of them was ever captured"
    end = time.monotonic() + 20
    while held(engine)["known"] and time.monotonic() < end:
        time.sleep(0.1)
    assert held(engine) == {"sequences": 0, "bytes": 0, "known": 0}


def test_another_shape_is_refused(engine: Engine) -> None:
    adapter = engine.adapter()
    for shape, said in (
        (RouteShape(layers=3, topk=2, experts=8), "has 2 MoE layers, the run's has 3"),
        (RouteShape(layers=2, topk=3, experts=8), "routes to 2 of 8 experts"),
        (RouteShape(layers=2, topk=2, experts=9), "the run's model to 2 of 9"),
        (SHAPE, "captured already"),
    ):
        with pytest.raises(EngineError, match=said):
            adapter.capture_routes(shape, Deadline(10))


def test_one_matrix_of_one_expert_that_does_not_come_is_missed(engine: Engine) -> None:
    """vLLM would take the layer as it is, with anything in the gap. The engine is lost after this."""
    sender = Sender(engine, "second")
    try:
        with pytest.raises(
            EngineError, match=r"only some of their weights, the first is model\.layers\.2\.mlp\.experts"
        ):
            load(
                engine.adapter(), engine, sender, "f1",
                leave_out="model.layers.2.mlp.experts.5.up_proj.weight",
            )  # fmt: skip
    finally:
        sender.close()


def generate(engine: Engine, request: str, prompt: list[int], **sampling: Any) -> list[Json]:
    """Every choice of one request with this id."""
    settings = {"logprobs": 0, "temperature": 1.0, "ignore_eos": True} | sampling
    body = {"model": "toy", "request_id": request, "token_ids": prompt, "sampling_params": settings}
    return engine.call("/inference/v1/generate", body)["choices"]


def generate_many(engine: Engine, name: str, lengths: Sequence[int], **sampling: Any) -> list[tuple[list[int], Json]]:
    """(prompt, choice) of requests NAME0, NAME1 ... at once, with prompts of these lengths."""
    rng = random.Random(name)
    prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in lengths]

    def one(index: int) -> tuple[list[int], Json]:
        (choice,) = generate(engine, f"{name}{index}", prompts[index], seed=index, **sampling)
        return prompts[index], choice

    with ThreadPoolExecutor(len(lengths)) as pool:
        return list(pool.map(one, range(len(lengths))))


def rpc(engine: Engine, method: str, **arguments: Any) -> Json:
    body = {"method": method, "args": [], "kwargs": arguments, "timeout": 30.0}
    return engine.call("/collective_rpc", body)["results"][0]


def take(engine: Engine, requests: list[str]) -> dict[str, Json]:
    return rpc(engine, "artd_take_routes", request_ids=requests)


def metrics(engine: Engine) -> set[str]:
    """vLLM's own lines of /metrics."""
    page = str(call(engine.socket, "GET", "/metrics", deadline=Deadline(10)))
    return {line for line in page.splitlines() if line.startswith("vllm:")}


def held(engine: Engine) -> Json:
    return rpc(engine, "artd_held_routes")


def abort(engine: Engine, request: str, after_s: float, dropped_first: bool) -> None:
    """A request whose client goes after a while; its routes are dropped before or after that, as by the gateway."""
    sampling = {"max_tokens": 400, "ignore_eos": True}
    body = {"model": "toy", "request_id": request, "token_ids": [5, 6, 7, 8], "sampling_params": sampling}
    data = json.dumps(body).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(engine.socket)
        client.sendall(head.encode() + b"\r\n\r\n" + data)
        time.sleep(after_s)
        if dropped_first:
            rpc(engine, "artd_drop_routes", request_ids=[request])
    if not dropped_first:
        rpc(engine, "artd_drop_routes", request_ids=[request])

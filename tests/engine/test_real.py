"""The engine worker with the real vLLM server: two server starts, merged on a toy Qwen3, lora on a toy Qwen3-MoE.

Expected values are Hugging Face's: `make_checkpoint.py` scores the canaries with it. Tests of a class share one server and
run in order; the last one of each ends it.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artd_schema.data.manifest import WeightTable
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines import canary
from artd_workers.engines.adapter import EngineError, Fence
from artd_workers.engines.http import StatusError
from artd_workers.engines.process.server import KILL_S
from tests.awake import SOON_S, Awake
from tests.engine.real import HERE, Engine, Sender, load, logprob, start, tool
from tests.fake_daemon import INSTANCE, ROOT, SPAWN

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]
V6_LOOPBACK = "00000000000000000000000001000000"


@pytest.fixture(scope="module")
def toys() -> Iterator[Path]:
    """Folder with a toy Qwen3 (`toy`) and merged checkpoints m0, m1, m2."""
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        folder = Path(name)
        tool(str(ROOT / "tests" / "toys.py"), str(folder / "toy"), "--family", "qwen3")
        wanted = [f"{folder}/m{step}:merged:{step + 1}:{step}" for step in range(3)]
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *wanted)
        yield folder


@pytest.fixture(scope="module")
def merged(toys: Path) -> Iterator[Engine]:
    yield from start(toys, "merged")


@pytest.fixture(scope="module")
def lora(moe_toys: Path) -> Iterator[Engine]:
    """The toy has dense and sparse layers, and its adapters are on attention, MLP and every expert."""
    yield from start(moe_toys, "lora")


class TestMerged:
    def test_starts_from_disk_and_serves_what_hugging_face_computes(self, merged: Engine) -> None:
        merged.live(merged.push("m0"))
        (span,) = merged.generate([5, 6, 7], max_tokens=3)["weight_versions"]
        assert span["version"] == "toy@0"

    def test_live_push_replaces_the_weights_and_their_cached_prefixes(self, merged: Engine) -> None:
        prompt = [3 + i * 7 % 1000 for i in range(300)]
        before = [logprob(merged.generate(prompt, max_tokens=1, temperature=0)) for _ in range(2)]
        sender = Sender(merged, "first")
        try:
            for step in ("m1", "m2", "m1"):
                sender.order(step)
                merged.live(merged.push(step, source="live", rendezvous=sender.rendezvous))
                sender.sent()
        finally:
            sender.close()
        choice = merged.generate(prompt, max_tokens=1, temperature=0)
        fresh = merged.generate(prompt, salt="nothing cached", max_tokens=1, temperature=0)
        assert choice["token_ids"] == fresh["token_ids"]
        assert logprob(choice) == pytest.approx(logprob(fresh), abs=1e-5)
        assert abs(logprob(choice) - before[1]) > 1e-3
        assert choice["weight_versions"][0]["version"] == "toy@1"

    def test_a_request_in_flight_ends_before_the_weights_change(self, merged: Engine) -> None:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(merged.generate, [5, 6, 7], max_tokens=400, ignore_eos=True)
            merged.runs()
            merged.live(merged.push("m0"))
            choice = running.result(SOON_S)
        assert choice["finish_reason"] == "length"
        assert [span["version"] for span in choice["weight_versions"]] == ["toy@1"]

    def test_one_percent_in_any_matrix_fails_the_canary(self, merged: Engine) -> None:
        adapter = merged.adapter()
        expected = merged.manifest("m1").canary
        sender = Sender(merged, "second")
        passed: list[str] = []
        try:
            names = [""] + [entry.name for entry in sender_table(merged, "m1").tensors if len(entry.shape) == 2]
            assert len(names) == 1 + 2 + 7 * 3
            for name in [*names, ""]:
                load(adapter, merged, sender, "m1", perturb=name)
                scores = adapter.score("toy", expected.prompts, Deadline(30))
                try:
                    canary.verify(expected, scores)
                    passed.append(name)
                except EngineError as error:
                    assert "canary failed" in str(error), error
        finally:
            sender.close()
        assert passed == ["", ""], "only the untouched weights may pass"

    def test_seeded_requests_with_concurrent_prefill_live(self, merged: Engine) -> None:
        def one(index: int) -> dict[str, Any]:
            prompt = [3 + (index * 31 + i) % 1000 for i in range(60 + 17 * index)]
            return merged.generate(prompt, salt=str(index), max_tokens=16, seed=index, temperature=1.0, ignore_eos=True)

        with ThreadPoolExecutor(24) as pool:
            choices = list(pool.map(one, range(24)))
        assert [len(choice["token_ids"]) for choice in choices] == [16] * 24
        assert merged.adapter().healthy(Deadline(5))

    def test_the_worker_refuses_an_older_fence_and_another_spawn(self, merged: Engine) -> None:
        adapter = merged.adapter()
        with pytest.raises(EngineError, match="has seen fence"):
            adapter.begin(Fence(INSTANCE, SPAWN, 1, 1), Deadline(10))
        with pytest.raises(EngineError, match="belongs to"):
            adapter.begin(Fence(INSTANCE, SPAWN + 1, 999, 999), Deadline(10))

    def test_a_trainer_that_dies_in_a_push_leaves_the_engine_unknown(self, merged: Engine) -> None:
        adapter = merged.adapter()
        sender = Sender(merged, "third")
        with Awake() as took, pytest.raises(EngineError, match="/update_weights"):
            load(adapter, merged, sender, "m1", die_after=7)
        assert took.seconds < 30, "the deadline is 60 s"
        sender.close()
        with pytest.raises(EngineError, match="restart the engine"):
            adapter.begin(merged.fence(), Deadline(10))

    def test_listens_on_loopback_at_most(self, merged: Engine) -> None:
        assert [address for address in merged.listeners() if address not in ("0100007F", V6_LOOPBACK)] == []

    def test_nothing_outlives_a_killed_harness(self, merged: Engine) -> None:
        assert len(merged.pids()) >= 4
        merged.daemon.process.kill()
        merged.daemon.process.wait()
        merged.nothing_left(within_s=5.0)


class TestLora:
    def test_adapters_are_loaded_beside_running_requests(self, lora: Engine) -> None:
        lora.live(lora.push("l1"))
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(lora.generate, [5, 6, 7], model="toy@1", max_tokens=300, ignore_eos=True)
            lora.runs()
            lora.live(lora.push("l2"))
            lora.daemon.send(w.Unload(name="toy@1"))
            assert len(running.result(SOON_S)["token_ids"]) == 300
        adapter = lora.adapter()
        end = time.monotonic() + SOON_S
        while not refused(lora, "toy@1"):
            assert time.monotonic() < end, "the adapter is still served"
            time.sleep(0.2)
        expected = lora.manifest("l2").canary
        canary.verify(expected, adapter.score("toy@2", expected.prompts, Deadline(30)))
        base = canary.measure(expected, adapter.score("toy@base", expected.prompts, Deadline(30)))
        assert base.max_abs > 1e-2, "the adapter changes the model"

    def test_the_canary_knows_one_adapter_from_another(self, lora: Engine) -> None:
        adapter = lora.adapter()
        adapter.load_adapter("other", lora.toys / "l3", Deadline(30))
        expected = lora.manifest("l2").canary
        with pytest.raises(EngineError, match="canary failed"):
            canary.verify(expected, adapter.score("other", expected.prompts, Deadline(30)))

    def test_adapters_of_one_batch_are_kept_apart(self, lora: Engine) -> None:
        adapter = lora.adapter()
        expected = {"toy@2": lora.manifest("l2").canary, "other": lora.manifest("l3").canary}
        for _ in range(3):
            with ThreadPoolExecutor(4) as pool:
                base = pool.submit(adapter.score, "toy@base", expected["other"].prompts, Deadline(30))
                found = {
                    name: pool.submit(adapter.score, name, one.prompts, Deadline(30)) for name, one in expected.items()
                }
            for name, one in expected.items():
                canary.verify(one, found[name].result())
            assert canary.measure(expected["other"], base.result()).max_abs > 1e-2

    def test_ends_in_time_with_requests_in_flight(self, lora: Engine) -> None:
        ended: list[str] = []

        def run() -> None:
            try:
                ended.append(lora.generate([5, 6], model="toy@2", max_tokens=500, ignore_eos=True)["finish_reason"])
            except EngineError as error:
                ended.append(str(error))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        lora.runs()
        assert not ended
        with Awake() as took:
            lora.daemon.send(w.Exit(grace_s=10.0))
            assert lora.daemon.wait() == 0
        assert took.seconds < 10.0 + KILL_S + 5.0, "the grace, SIGKILL, and what a busy machine adds"
        for thread in threads:
            thread.join(SOON_S)
        assert len(ended) == 4
        lora.nothing_left(within_s=0.0)


def refused(engine: Engine, model: str) -> bool:
    """Whether the server answers 404 for this name."""
    try:
        engine.generate([5], model=model, max_tokens=1)
    except StatusError as error:
        return error.status == 404
    return False


def sender_table(engine: Engine, checkpoint: str) -> WeightTable:
    return msgspec.json.decode((engine.toys / checkpoint / "weights.json").read_bytes(), type=WeightTable)

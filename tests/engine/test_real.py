"""The engine worker with the real vLLM server on a toy Qwen3: two server starts, merged and lora.

Expected values are Hugging Face's: `make_checkpoint.py` scores the canaries with it. Tests of a class share one server and
run in order; the last one of each ends it.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from artd.runtimes import registry
from artd_schema import worker as w
from artd_schema.manifest import CheckpointManifest, WeightTable
from artd_schema.spec import EngineSpec, LoraSpec, Mode, RunSpec
from artd_workers.engines import canary
from artd_workers.engines.base import Deadline, EngineError, Fence
from artd_workers.engines.http import StatusError, call
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.engine.conftest import sha
from tests.engine.daemon import INSTANCE, ROOT, SPAWN, FakeDaemon

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]
HERE = Path(__file__).parent
TOOL_ENV = {"PYTHONPATH": f"{ROOT / 'workers'}:{ROOT / 'schema'}", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
START_S = 240.0
V6_LOOPBACK = "00000000000000000000000001000000"


def tool(*argv: str) -> None:
    python = str(registry.find("megatron").python)
    subprocess.run([python, *argv], check=True, env=os.environ | TOOL_ENV, capture_output=True, text=True, timeout=180)


@pytest.fixture(scope="module")
def toys() -> Iterator[Path]:
    """Folder with a toy Qwen3 (`toy`) and checkpoints m0, m1, m2 (merged) and l1, l2 (lora)."""
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        folder = Path(name)
        tool(str(ROOT / "tests" / "toys.py"), str(folder / "toy"), "--family", "qwen3")
        wanted = [f"{folder}/{kind}{step}:{mode}:{step + 1}:{step}" for kind, mode, step in
                  (("m", "merged", 0), ("m", "merged", 1), ("m", "merged", 2), ("l", "lora", 1), ("l", "lora", 2))]  # fmt: skip
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *wanted)
        yield folder


@dataclass
class Engine:
    """A real server under a harness under a fake daemon."""

    daemon: FakeDaemon
    toys: Path
    mode: Mode
    socket: str = ""
    fences: int = 0
    scratch: set[str] = field(default_factory=set)

    def push(self, checkpoint: str, **changes: Any) -> w.Push:
        self.fences += 1
        folder = self.toys / checkpoint
        step = int(checkpoint[1:])
        ref = w.CheckpointRef(run="toy", step=step, epoch=step, lineage=0, sha=sha(folder), dir=str(folder))
        values = {"push": self.fences, "fence": self.fences, "checkpoint": ref, "mode": self.mode, "source": "disk",
                  "name": f"toy@{step}", "drain_s": 20.0, "deadline_s": 60.0}  # fmt: skip
        return w.Push(**(values | changes))

    def live(self, push: w.Push) -> w.Live:
        self.daemon.send(push)
        answer = self.daemon.expect((w.Live, w.PushFailed), 120.0)
        assert isinstance(answer, w.Live), answer
        assert answer.max_abs <= 1e-5
        return answer

    def fence(self) -> Fence:
        self.fences += 1
        return Fence(INSTANCE, SPAWN, self.fences, self.fences)

    def call(self, route: str, body: Any, timeout_s: float = 60.0) -> Any:
        return call(self.socket, "POST", route, body, deadline=Deadline(timeout_s))

    def generate(self, prompt: list[int], model: str = "toy", salt: str = "", **sampling: Any) -> dict[str, Any]:
        """One choice of /inference/v1/generate."""
        body = {"model": model, "token_ids": prompt, "sampling_params": {"logprobs": 0} | sampling}
        return self.call("/inference/v1/generate", body | ({"cache_salt": salt} if salt else {}))["choices"][0]

    def manifest(self, checkpoint: str) -> CheckpointManifest:
        return msgspec.json.decode((self.toys / checkpoint / "manifest.json").read_bytes(), type=CheckpointManifest)

    def pids(self) -> list[int]:
        """Live processes in the harness's session."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                stat = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else []
            except (FileNotFoundError, ProcessLookupError):
                continue
            if stat and stat[0] not in "ZX" and int(stat[3]) == self.daemon.process.pid:
                found.append(int(entry.name))
        return found

    def listeners(self) -> list[str]:
        """Addresses (as /proc/net/tcp writes them) that processes of the session listen on by TCP."""
        held = {os.readlink(fd) for pid in self.pids() for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()}
        rows = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        ]
        return [row[1].split(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in held]

    def nothing_left(self, within_s: float) -> None:
        end = time.monotonic() + within_s
        while self.pids() and time.monotonic() < end:
            time.sleep(0.1)
        assert self.pids() == []
        assert not [path for path in self.scratch if Path(path).exists()]


def start(toys: Path, mode: Mode) -> Iterator[Engine]:
    python = str(registry.find("vllm").python)
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        spec = RunSpec(model=str(toys / "toy"), rollout_weights_mode=mode, lora=LoraSpec(rank=4, alpha=8),
                       engine=EngineSpec(max_model_len=512, max_num_seqs=16, kv_cache_mib=64))  # fmt: skip
        config = w.EngineConfig(run="toy", spec=spec, dir=f"{name}/e", log=f"{name}/engine.log", python=python)
        with FakeDaemon(config, python) as daemon:
            engine = Engine(daemon, toys, mode)
            answer = daemon.expect((w.Ready, w.Down), START_S)
            assert isinstance(answer, w.Ready), answer
            engine.socket = answer.socket
            engine.scratch = held_scratch(daemon.process.pid)
            assert engine.scratch, "the real server holds files in /dev/shm: this test no longer sees them"
            yield engine


def held_scratch(session: int) -> set[str]:
    found = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                lines = (entry / "maps").read_text().splitlines()
                found |= {line.split()[-1] for line in lines if " /dev/shm/" in line and "(deleted)" not in line}
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


class Sender:
    """The trainer's end of live pushes, in the megatron interpreter."""

    def __init__(self, engine: Engine, rendezvous: str) -> None:
        self.rendezvous = str(Path(engine.socket).parent / rendezvous)
        self.table = Path(engine.socket).parent / f"{rendezvous}.json"
        argv = [
            str(registry.find("megatron").python),
            str(HERE / "sender.py"),
            str(engine.toys / "toy"),
            self.rendezvous,
        ]
        self.process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | TOOL_ENV
        )
        self._folder = engine.toys

    def order(self, checkpoint: str, **changes: Any) -> WeightTable:
        """Have it send a checkpoint's tensors; returns the table of what it is sending."""
        assert self.process.stdin is not None
        order = {"checkpoint": str(self._folder / checkpoint), "table": str(self.table)} | changes
        self.process.stdin.write(json.dumps(order) + "\n")
        self.process.stdin.flush()
        self._line("ready")
        return msgspec.json.decode(self.table.read_bytes(), type=WeightTable)

    def sent(self) -> None:
        self._line("sent")

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()

    def _line(self, text: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline().strip() == text


@pytest.fixture(scope="module")
def merged(toys: Path) -> Iterator[Engine]:
    yield from start(toys, "merged")


@pytest.fixture(scope="module")
def lora(toys: Path) -> Iterator[Engine]:
    yield from start(toys, "lora")


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
            running = pool.submit(merged.generate, [5, 6, 7], max_tokens=200, ignore_eos=True)
            time.sleep(0.3)
            merged.live(merged.push("m0"))
            choice = running.result(30)
        assert choice["finish_reason"] == "length"
        assert [span["version"] for span in choice["weight_versions"]] == ["toy@1"]

    def test_one_percent_in_any_matrix_fails_the_canary(self, merged: Engine) -> None:
        adapter = VllmAdapter(Path(merged.socket), Deadline(5))
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
        assert VllmAdapter(Path(merged.socket), Deadline(5)).healthy(Deadline(5))

    def test_the_worker_refuses_an_older_fence_and_another_spawn(self, merged: Engine) -> None:
        adapter = VllmAdapter(Path(merged.socket), Deadline(5))
        with pytest.raises(EngineError, match="has seen fence"):
            adapter.begin(Fence(INSTANCE, SPAWN, 1, 1), Deadline(10))
        with pytest.raises(EngineError, match="belongs to"):
            adapter.begin(Fence(INSTANCE, SPAWN + 1, 999, 999), Deadline(10))

    def test_a_trainer_that_dies_in_a_push_leaves_the_engine_unknown(self, merged: Engine) -> None:
        adapter = VllmAdapter(Path(merged.socket), Deadline(5))
        sender = Sender(merged, "third")
        began = time.monotonic()
        with pytest.raises(EngineError, match="/update_weights"):
            load(adapter, merged, sender, "m1", die_after=7)
        assert time.monotonic() - began < 30
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
            time.sleep(0.2)
            lora.live(lora.push("l2"))
            lora.daemon.send(w.Unload(name="toy@1"))
            assert len(running.result(60)["token_ids"]) == 300
        adapter = VllmAdapter(Path(lora.socket), Deadline(5))
        end = time.monotonic() + 10
        while time.monotonic() < end and not refused(lora, "toy@1"):
            time.sleep(0.2)
        assert refused(lora, "toy@1")
        expected = lora.manifest("l2").canary
        canary.verify(expected, adapter.score("toy@2", expected.prompts, Deadline(30)))
        base = canary.measure(expected, adapter.score("toy@base", expected.prompts, Deadline(30)))
        assert base.max_abs > 1e-2, "the adapter changes the model"

    def test_the_canary_knows_one_adapter_from_another(self, lora: Engine) -> None:
        adapter = VllmAdapter(Path(lora.socket), Deadline(5))
        adapter.load_adapter("other", lora.toys / "m0", Deadline(30))
        expected = lora.manifest("l2").canary
        with pytest.raises(EngineError, match="canary failed"):
            canary.verify(expected, adapter.score("other", expected.prompts, Deadline(30)))

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
        time.sleep(0.3)
        assert not ended
        began = time.monotonic()
        lora.daemon.send(w.Exit(grace_s=10.0))
        assert lora.daemon.wait(30) == 0
        assert time.monotonic() - began < 16
        for thread in threads:
            thread.join(10)
        assert len(ended) == 4
        lora.nothing_left(within_s=0.0)


def logprob(choice: dict[str, Any]) -> float:
    return choice["logprobs"]["content"][0]["logprob"]


def refused(engine: Engine, model: str) -> bool:
    """Whether the server answers 404 for this name."""
    try:
        engine.generate([5], model=model, max_tokens=1)
    except StatusError as error:
        return error.status == 404
    return False


def sender_table(engine: Engine, checkpoint: str) -> WeightTable:
    return msgspec.json.decode((engine.toys / checkpoint / "weights.json").read_bytes(), type=WeightTable)


def load(adapter: VllmAdapter, engine: Engine, sender: Sender, checkpoint: str, **order: Any) -> None:
    """A live transfer without the harness and its canary, of possibly disturbed weights with honest hashes."""
    deadline = Deadline(60)
    fence = engine.fence()
    adapter.pause(5.0, deadline)
    adapter.begin(fence, deadline)
    table = sender.order(checkpoint, **order)
    adapter.join(sender.rendezvous, deadline)
    adapter.receive(fence, table.tensors, deadline)
    sender.sent()
    adapter.finish("test", deadline)
    adapter.resume(deadline)

"""The warm-up of the experts' kernel: which steps, what the harness does with it, and whether vLLM's own code agrees."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest

from artd.runtimes import registry
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines import worker as worker_module
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.vllm import warm as inside
from artd_workers.engines.vllm.warm import Experts, steps
from artd_workers.engines.warm import WARM_S, warm
from artd_workers.engines.worker import EngineWorker
from tests.engine.conftest import Bench
from tests.engine.real import HERE, TOOL_ENV
from tests.engine.test_push_direct import PLAIN
from tests.fake_daemon import WorkerDaemon

TRITON = msgspec.structs.replace(PLAIN, moe_backend="TRITON")
BEFORE_READY = ["/version", "artd_direct_table"]


# ---- which steps ------------------------------------------------------------------------------------------------------


def tiles(tokens: int) -> Mapping[str, int]:
    return {"BLOCK_SIZE_M": 16 if tokens <= 2 else 64}


EIGHT = Experts(tiles, chosen=2, known=8)


@pytest.mark.parametrize(
    ("experts", "wanted"),
    [
        # 1: rows are not sorted; 2: are; 3, 4, 12: 16 divides the padded rows; 8, 16: the rows; the other nine: neither.
        ([EIGHT], [5, 3, 8, 1, 2]),
        ([EIGHT, EIGHT], [5, 3, 8, 1, 2]),
        # Behind a map all are sorted.
        ([Experts(tiles, chosen=2, known=8, mapped=True)], [5, 3, 1, 8]),
        # One of one: a size of 1 is a constant; nothing but its tiles tells the rest apart, until 16.
        ([Experts(lambda tokens: {"BLOCK_SIZE_M": 16}, chosen=1, known=1)], [2, 1, 16]),
        ([], []),
    ],
)
def test_one_step_for_each_form_and_what_most_are_first(experts: list[Experts], wanted: list[int]) -> None:
    assert steps(experts, 16) == wanted


def test_layers_that_differ_are_told_apart_together() -> None:
    other = Experts(lambda tokens: {"BLOCK_SIZE_M": 16 if tokens <= 6 else 64}, chosen=2, known=8)
    found = steps([EIGHT, other], 16)
    assert len({(EIGHT.form(n), other.form(n)) for n in found}) == len(found)
    assert {(EIGHT.form(n), other.form(n)) for n in found} == {(EIGHT.form(n), other.form(n)) for n in range(1, 17)}


@pytest.mark.real
@pytest.mark.timeout(300)
def test_steps_are_those_that_vllm_would_compile_for() -> None:
    """Each kernel once, by the arguments that vLLM's own code launches it with; the last shape has no tuned tiles."""
    shapes = ("128,8,768", "8,2,14336", "60,6,128")
    command = [str(registry.find("vllm").python), str(HERE / "kernel_keys.py"), "NVIDIA H200", "8192", *shapes]
    done = subprocess.run(command, env=os.environ | TOOL_ENV, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for found, kernels in zip(map(json.loads, done.stdout.splitlines()[-3:]), (28, 34, 23), strict=True):
        keys, share = found["keys"], Counter(found["keys"])
        met = [keys[tokens - 1] for tokens in found["steps"]]
        assert sorted(met) == sorted(share)
        assert [share[key] for key in met] == sorted(share.values(), reverse=True)
        assert len(met) == kernels


# ---- in the worker ----------------------------------------------------------------------------------------------------


class Runner:
    """vLLM's model runner as far as a warm-up goes, and its clock: a dummy step takes a second and compiles two kernels."""

    max_num_tokens = 16

    def __init__(self, hooks: Any, fails_at: int = 0) -> None:
        self.ran: list[int] = []
        self._hooks, self._fails_at = hooks, fails_at

    def monotonic(self) -> float:
        return 100.0 + len(self.ran)

    def get_model(self) -> None:
        return None

    def _dummy_run(self, tokens: int, *, cudagraph_runtime_mode: str, skip_eplb: bool) -> None:
        assert cudagraph_runtime_mode == "none" and skip_eplb
        if tokens == self._fails_at:
            raise MemoryError("CUDA out of memory")
        self.ran.append(tokens)
        for _ in "12":
            self._hooks.jit_post_compile_hook(fn=SimpleNamespace(name="fused_moe_kernel"), already_compiled=False)

    def _sync_device(self) -> None:
        self.ran.append(0)


def monitor(**_: Any) -> None:
    raise AssertionError("vLLM's monitor would have warned of a kernel that the warm-up made ready")


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Triton's hooks, among modules with the names that a warm-up imports."""
    found = SimpleNamespace(jit_post_compile_hook=monitor)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm.config": {"CUDAGraphMode": SimpleNamespace(NONE="none")},
        "vllm.triton_utils": {"HAS_TRITON": True},
        "triton": {"knobs": SimpleNamespace(runtime=found)},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(inside, "experts_of", lambda model: [EIGHT])
    yield found
    assert found.jit_post_compile_hook is monitor


def test_every_form_is_run_and_its_kernels_are_counted(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(hooks)
    monkeypatch.setattr(inside, "time", runner)
    assert inside.warm(runner, 60.0) == {"forms": 5, "run": 5, "kernels": 10, "seconds": 6.0}
    assert runner.ran == [5, 3, 8, 1, 2, 0], "and the device is waited for"


def test_no_step_begins_after_the_time(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = Runner(hooks)
    monkeypatch.setattr(inside, "time", runner)
    done = inside.warm(runner, 2.0)
    assert runner.ran == [5, 3, 0]
    assert (done["forms"], done["run"]) == (5, 2)


def test_the_monitor_is_back_after_a_failure(hooks: Any) -> None:
    with pytest.raises(MemoryError):
        inside.warm(Runner(hooks, fails_at=8), 60.0)


# ---- in the harness ---------------------------------------------------------------------------------------------------


def on_gpu(bench: Bench, table: Any = TRITON, **script: Any) -> WorkerDaemon:
    """A harness whose server would run on a GPU and says this table."""
    bench.engine = {"device": "cuda"}
    bench.script = {"version": "0.25.1", "table": msgspec.to_builtins(table)} | script
    return bench.start()


def wait_for(bench: Bench, daemon: WorkerDaemon, route: str) -> None:
    end = time.monotonic() + 20
    while route not in bench.routes():
        assert time.monotonic() < end, f"nobody called {route}"
        daemon.hear(0.05)


def test_kernels_are_warmed_up_before_ready(bench: Bench, capfd: pytest.CaptureFixture[str]) -> None:
    with on_gpu(bench) as daemon:
        daemon.ready()
        assert bench.routes() == [*BEFORE_READY, "artd_warm"]
        daemon.send(bench.push(0))
        assert daemon.expect(w.Live).fence == 1
    assert bench.routes().count("artd_warm") == 1
    (call,) = [call for call in bench.calls() if call["route"] == "artd_warm"]
    assert 0.8 * WARM_S < call["body"]["kwargs"]["timeout_s"] < WARM_S, "its own end comes before the call's"
    assert "warm-up in 1.5 s: 27 of 28 forms of the experts' kernel, 41 kernels" in capfd.readouterr().err


@pytest.mark.parametrize("backend", ["", "FLASHINFER_CUTLASS", "CPU"])
def test_an_engine_without_such_kernels_is_not_asked(bench: Bench, backend: str) -> None:
    with on_gpu(bench, msgspec.structs.replace(PLAIN, moe_backend=backend)) as daemon:
        daemon.ready()
        assert bench.routes() == BEFORE_READY


@pytest.mark.parametrize("how", [{"faults": {"artd_warm": 500}}, {"warm": {}}], ids=["refused", "odd"])
def test_a_failed_warm_up_is_told_and_costs_nothing_else(
    bench: Bench, capfd: pytest.CaptureFixture[str], how: dict[str, Any]
) -> None:
    with on_gpu(bench, **how) as daemon:
        daemon.ready()
        daemon.send(bench.push(0))
        assert daemon.expect(w.Live).fence == 1
    said = capfd.readouterr().err
    assert "no warm-up" in said
    assert ("scripted failure of artd_warm" if "faults" in how else "KeyError: 'seconds'") in said


def test_a_warm_up_that_hangs_ends_at_its_deadline(bench: Bench) -> None:
    bench.script = {"faults": {"artd_warm": "hang"}}
    told: list[str] = []
    with bench.serve() as pusher:
        began = time.monotonic()
        warm(pusher._adapter, Deadline(0.3), told.append)
        assert time.monotonic() - began < 10
    (line,) = told
    assert "EngineTimeout: artd_warm: no answer within 0.3 s" in line


def test_an_engine_that_dies_in_its_warm_up_is_not_ready(bench: Bench) -> None:
    with on_gpu(bench, faults={"artd_warm": "hang"}) as daemon:
        wait_for(bench, daemon, "artd_warm")
        os.kill(int(Path(bench.config.log).read_text().split()[2]), signal.SIGKILL)
        assert "signal 9" in daemon.expect(w.Down).error
        assert daemon.wait() == 1
    assert not any(isinstance(message, w.Ready) for message in daemon.received)
    assert not bench.processes()


def test_exit_is_heard_while_kernels_are_warmed_up(bench: Bench) -> None:
    with on_gpu(bench, faults={"artd_warm": "hang"}) as daemon:
        wait_for(bench, daemon, "artd_warm")
        daemon.send(w.Exit(grace_s=1.0))
        assert daemon.wait() == 0
    assert not any(isinstance(message, w.Ready | w.Down) for message in daemon.received)
    assert not bench.processes()


class Sick:
    """An adapter whose engine's core has died, while the server that answers for it has not yet."""

    def warm(self, deadline: Deadline) -> dict[str, float]:
        raise EngineError("the engine core has died")

    def healthy(self, deadline: Deadline) -> bool:
        return False


def test_an_engine_that_is_sick_after_it_is_not_ready(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_TOLD_S", 0.05)
    bench.prepare()
    worker = EngineWorker(SimpleNamespace(send=None, receive=lambda _: None), bench.config)
    worker._server = SimpleNamespace(ended=threading.Event())
    with pytest.raises(EngineError, match="does not answer after its warm-up"):
        worker._warm(Sick(), Deadline(5))

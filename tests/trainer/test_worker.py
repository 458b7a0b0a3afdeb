"""The trainer worker as a process, against a fake daemon: restarts, fences, failures, live pushes."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artd.models.base_model import pin
from artd_schema import crashpoint
from artd_schema.data.manifest import ADAPTER_FILE, MODEL_FILE
from artd_schema.run.spec import EngineSpec
from artd_schema.wire import worker as w
from artd_workers.transfer import gloo
from artd_workers.transfer.merge import BaseWeights, merged_tensors
from tests import toys

from . import rig
from .jobs import TrainerDaemon, batches, files, files_in, manifest, push_of, receive, spec_for, table_of

pytestmark = [
    pytest.mark.torch,
    pytest.mark.timeout(600),
]  # each start imports Megatron: 5 s idle, 40 s on a busy machine


@pytest.fixture
def daemon(tmp_path: Path, toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerDaemon]:
    monkeypatch.setenv(crashpoint.VARIABLE, str(tmp_path))
    fake = TrainerDaemon(tmp_path / "d", spec_for(toy_folders["llama"]))
    fake.start()
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("qwen3", "lora"),
        ("moe", "full"),
        pytest.param("tied", "lora", marks=pytest.mark.slow),
        pytest.param("tied", "full", marks=pytest.mark.slow),
    ],
)
def test_two_and_two_steps_are_four(tmp_path: Path, toy_folders: dict[str, Path], family: str, parameters: str) -> None:
    """The process is killed with -9 after step 2; what it writes then is what it writes without."""
    spec = spec_for(toy_folders[family], parameters=parameters, expert_replay=False)
    results = []
    for name, kill_after in (("straight", None), ("killed", 2)):
        daemon = TrainerDaemon(tmp_path / name, spec)
        try:
            daemon.start()
            ref = daemon.commit(0, None, None)
            first = files(ref)
            for step, batch in enumerate(batches(daemon, 4), 1):
                ref = daemon.commit(step, ref, batch)
                if step == kill_after:
                    daemon.kill()
                    daemon.start()
            results.append((first, files(ref), manifest(ref)))
        finally:
            daemon.close()
    (first, straight, before), (_, killed, after) = results
    assert {n for n in straight.keys() | killed.keys() if straight.get(n) != killed.get(n)} == set()
    assert before.canary == after.canary and before.parameters == after.parameters == parameters
    times = ("tokens_per_s",)
    assert {k: v for k, v in before.metrics.items() if k not in times} == {
        k: v for k, v in after.metrics.items() if k not in times
    }
    weights = MODEL_FILE if parameters == "full" else ADAPTER_FILE
    assert (
        weights in straight
        and len({MODEL_FILE, ADAPTER_FILE} & set(straight)) == 1
        and straight[weights] != first[weights]
    )
    assert before.metrics["mismatch_tokens"] == before.metrics["trained_tokens"] == 84
    assert json.loads(straight["state.json"])["batches"] == 4


def test_killed_after_training_before_committed(daemon: TrainerDaemon) -> None:
    """The staged step is thrown away; the next process does it again from the parent's files, to the same bytes."""
    batch = batches(daemon, 1)[0]
    parent = daemon.commit(0, None, None)
    run = daemon.order(1, parent, batch)
    lost = daemon.publish(run, daemon.staged(run))
    daemon.kill()
    daemon.start()
    again = daemon.commit(1, parent, batch)
    assert files(again) == files(lost)


def test_fenced_memory_is_dirty(daemon: TrainerDaemon) -> None:
    """After Fenced the same process reloads its parent: same bytes as the fenced result, not a second step on top."""
    batch = batches(daemon, 1)[0]
    parent = daemon.commit(0, None, None)
    run = daemon.order(1, parent, batch)
    report = daemon.staged(run)
    kept = files_in(Path(report.dir))
    daemon.send(w.Fenced(job=run.job, fence=run.fence))
    again = daemon.commit(1, parent, batch)
    assert files(again) == kept
    assert not Path(report.dir).exists(), "files of a fenced job stay behind"
    assert json.loads(files(again)["state.json"])["batches"] == 1


def test_a_parent_that_is_not_resident(daemon: TrainerDaemon) -> None:
    """Memory holds step 1, the next job starts from step 0 (a rollback): it reads step 0."""
    one, _ = batches(daemon, 2)
    zero = daemon.commit(0, None, None)
    first = daemon.commit(1, zero, one)
    assert files(daemon.commit(1, zero, one)) == files(first)


STAGED = ["stage.files", "stage.manifest", "train.committed"]


def test_memory_is_used_when_it_is_the_parent(daemon: TrainerDaemon, tmp_path: Path) -> None:
    zero = daemon.commit(0, None, None)
    one, two = batches(daemon, 2)
    first = daemon.commit(1, zero, one)
    shutil.rmtree(first.dir)
    daemon.commit(2, first, two)  # would be CheckpointError if it read the folder
    init, step = ["train.accepted", *STAGED], ["train.accepted", "train.stepped", *STAGED]
    assert crashpoint.list_reached(tmp_path)[:9] == [*init, *step]


def test_damaged_inputs_are_permanent(daemon: TrainerDaemon, tmp_path: Path) -> None:
    zero = daemon.commit(0, None, None)
    batch = batches(daemon, 1)[0]
    other = tmp_path / "other.safetensors"
    raw = bytearray(batch.tensors.read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    failed = daemon.failed(daemon.order(1, zero, rig.WrittenBatch(other, batch.manifest, batch.sha)))
    assert failed.failure == "permanent" and "does not have the sha256" in failed.error
    failed = daemon.failed(daemon.order(1, zero, rig.WrittenBatch(batch.tensors, batch.manifest, "0" * 64)))
    assert failed.failure == "permanent" and "sha256" in failed.error
    adapter = Path(zero.dir) / "adapter_model.safetensors"
    raw = bytearray(adapter.read_bytes())
    raw[-1] ^= 1
    adapter.write_bytes(raw)
    failed = daemon.failed(daemon.order(1, zero, batch))
    assert failed.failure == "permanent" and "adapter_model.safetensors" in failed.error


def test_a_non_finite_loss_is_permanent_and_leaves_no_trace(daemon: TrainerDaemon) -> None:
    zero = daemon.commit(0, None, None)
    batch = batches(daemon, 1)[0]
    columns = load_file(batch.tensors)
    columns["advantages"] *= 1e38
    bad = rig.save_columns(daemon.work / "bad", "bad", columns, 8)
    run = daemon.order(1, zero, bad)
    failed = daemon.failed(run)
    assert failed.failure == "permanent" and "loss" in failed.error and failed.trace
    assert not Path(run.dir).exists()
    first = daemon.commit(1, zero, batch)
    daemon.kill()
    daemon.start()
    assert files(daemon.commit(1, zero, batch)) == files(first)


def test_cancel_between_rows(daemon: TrainerDaemon) -> None:
    zero = daemon.commit(0, None, None)
    columns = load_file(batches(daemon, 1)[0].tensors)
    many = rig.save_columns(daemon.work / "many", "many", {n: t.repeat(60, 1) for n, t in columns.items()}, 8)
    run = daemon.order(1, zero, many)
    daemon.send(run)
    first = daemon.marked(run, 2)  # the batch was read, and a row went forward
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGUSR1)  # where are you? (asked of one that stands still)
    daemon.marked(run, first + 1)  # heartbeats go on while it trains, and tell of ever more
    daemon.send(w.Cancel(job=run.job, fence=run.fence))
    report = daemon.take((w.Staged, w.Failed))
    assert isinstance(report, w.Failed) and report.failure == "interrupted" and "cancelled" in report.error
    assert " in train_step" in daemon.log()


def test_a_repeated_run_is_done_once_and_its_report_resent(daemon: TrainerDaemon) -> None:
    run = daemon.order(0, None, None)
    daemon.send(run)
    daemon.send(run)
    first, second = daemon.take(w.Staged), daemon.take(w.Staged)
    assert first == second
    ref = daemon.publish(run, first)
    daemon.send(w.Committed(job=run.job, fence=run.fence, checkpoint=ref))
    # Reports that were on their way come first, however late; one that goes on comes every second.
    assert any(daemon.quiet(w.Staged, 2.5) for _ in range(10)), "still reporting after Committed"
    assert not Path(run.dir).exists(), "the job was done twice"


def test_exit(daemon: TrainerDaemon) -> None:
    daemon.commit(0, None, None)
    daemon.send(w.Exit(grace_s=5.0))
    assert daemon.process is not None and daemon.process.wait(60) == 0


def test_unsupported_model_is_permanent(tmp_path: Path) -> None:
    folder = toys.make(tmp_path / "biased", attention_bias=True)
    daemon = TrainerDaemon(tmp_path / "d", spec_for(folder))
    try:
        daemon.start()
        failed = daemon.failed(daemon.order(0, None, None))
        assert failed.failure == "permanent" and "attention_bias" in failed.error
    finally:
        daemon.close()


# ---- live pushes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "parameters", "mode", "dtype"),
    [
        ("llama", "lora", "merged", "float32"),
        ("llama", "lora", "merged", "bfloat16"),
        ("llama", "lora", "lora", "float32"),
        ("moe", "full", "merged", "bfloat16"),
    ],
)
def test_live_pushes(
    tmp_path: Path, toy_folders: dict[str, Path], family: str, parameters: str, mode: str, dtype: str
) -> None:
    """Two pushes over one group give the tensors of weights.json, which are the merge of what lies on disk, or its weights."""
    folder, engine = toy_folders[family], EngineSpec(dtype=dtype)
    spec = spec_for(folder, parameters=parameters, rollout_weights_mode=mode, engine=engine, expert_replay=False)
    daemon = TrainerDaemon(tmp_path / "d", spec)
    try:
        daemon.start()
        ref, rendezvous, group = daemon.commit(0, None, None), daemon.work / "pair", None
        for step, batch in enumerate(batches(daemon, 2), 1):
            ref = daemon.commit(step, ref, batch)
            daemon.send(push_of(ref, rendezvous, step, step))
            group = group or gloo.join(str(rendezvous), gloo.ENGINE, 30.0)
            found = receive(group, table_of(ref))
            wanted = on_disk(folder, Path(ref.dir), parameters, mode, getattr(torch, dtype))
            assert list(found) == list(wanted)
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    finally:
        daemon.close()


def on_disk(base: Path, folder: Path, parameters: str, mode: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """What a checkpoint folder says that the engine is served, in push order."""
    if parameters == "full":
        weights = load_file(folder / MODEL_FILE)
        return {name: weights[name].to(dtype) for name in BaseWeights(base)}
    adapter = load_file(folder / ADAPTER_FILE)
    if mode == "lora":
        return dict(sorted(adapter.items()))
    return dict(merged_tensors(BaseWeights(base), adapter, rig.ALPHA / rig.RANK, dtype))


def test_pushes_that_are_refused(daemon: TrainerDaemon) -> None:
    one = batches(daemon, 1)[0]
    zero = daemon.commit(0, None, None)
    first = daemon.commit(1, zero, one)
    daemon.send(push_of(zero, daemon.work / "pair", 1, 5))
    assert "r@0" in daemon.take(w.Refused).reason
    daemon.send(push_of(first, daemon.work / "pair", 2, 4))
    assert "older than 5" in daemon.take(w.Refused).reason
    run = daemon.order(1, zero, one)
    staged = daemon.publish(run, daemon.staged(run))
    daemon.send(push_of(staged, daemon.work / "pair", 3, 6))
    assert daemon.take(w.Refused).push == 3, "uncommitted weights were offered"
    daemon.kill()
    daemon.start()
    daemon.send(push_of(first, daemon.work / "pair", 4, 7))
    assert daemon.take(w.Refused).push == 4


def test_a_push_survives_the_next_job_and_a_dead_engine(daemon: TrainerDaemon) -> None:
    """Training goes on while a push waits for its engine; the tensors sent are the pushed step's. Then the engine dies
    in the middle of a push: the trainer stays, and a new pair works."""
    one, two = batches(daemon, 2)
    first = daemon.commit(1, daemon.commit(0, None, None), one)
    daemon.send(push_of(first, daemon.work / "a", 1, 1))
    second = daemon.commit(2, first, two)
    group = gloo.join(str(daemon.work / "a"), gloo.ENGINE, 30.0)
    receive(group, table_of(first))
    daemon.send(push_of(second, daemon.work / "a", 2, 2))
    entry = table_of(second).tensors[0]
    gloo.broadcast(group, torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)), 20.0)
    group.abort()
    del group
    daemon.send(push_of(second, daemon.work / "never", 3, 3))
    daemon.send(w.PushEnd(push=3, fence=3))
    daemon.send(push_of(second, daemon.work / "never", 4, 4))
    assert "afresh" in daemon.take(w.Refused).reason
    daemon.send(push_of(second, daemon.work / "b", 5, 5))
    receive(gloo.join(str(daemon.work / "b"), gloo.ENGINE, 30.0), table_of(second))


def test_a_base_model_with_other_bytes_is_refused_by_its_hash(tmp_path: Path, toy_folders: dict[str, Path]) -> None:
    """Also where size, time and inode say that it is the same."""
    folder = tmp_path / "base"
    shutil.copytree(toy_folders["llama"], folder)
    fake = TrainerDaemon(tmp_path / "d", spec_for(folder))
    fake.base = pin(str(folder))
    try:
        fake.start()
        fake.kill()
        weights = next(folder.glob("*.safetensors"))
        before = weights.stat()
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
        fake.start(ready=False)
        assert fake.process is not None and fake.process.wait(120) == 1
        assert f"trainer worker: base model file {weights} has sha256" in fake.log()
    finally:
        fake.close()


def test_a_base_model_that_changes_while_it_is_used_ends_the_trainer(
    tmp_path: Path, toy_folders: dict[str, Path]
) -> None:
    """Its weights are read again for what an engine is served. The next process finds the old ones, when they are back."""
    folder = tmp_path / "base"
    shutil.copytree(toy_folders["llama"], folder)
    fake = TrainerDaemon(tmp_path / "d", spec_for(folder))
    fake.base = pin(str(folder))
    try:
        fake.start()
        batch, zero = batches(fake, 1)[0], fake.commit(0, None, None)
        weights = next(folder.glob("*.safetensors"))
        os.utime(weights, ns=(0, 0))
        failed = fake.failed(fake.order(1, zero, batch))
        assert failed.failure == "transient" and "changed while it was used" in failed.error
        assert fake.process is not None and fake.process.wait(30) == 1
        fake.start()
        fake.commit(1, zero, batch)
    finally:
        fake.close()

"""What tests of the trainer's process share: specs, batches, checkpoint files, pushes."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import torch

from artd_schema.codec import digest
from artd_schema.data.base import BaseModel
from artd_schema.data.manifest import CheckpointManifest, WeightTable
from artd_schema.run.spec import LoraSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.transfer import gloo
from tests.fake_daemon import INSTANCE, WorkerDaemon

from . import rig


def spec_for(folder: Path, **changes: object) -> RunSpec:
    fields: dict[str, object] = {
        "model": str(folder), "row_length": 256, "threads": 1, "seed": 3,
        "lora": LoraSpec(rank=rig.RANK, alpha=rig.ALPHA), "optimizer": OptimizerSpec(lr=0.01),
    }  # fmt: skip
    return RunSpec(**(fields | changes))


class TrainerDaemon(WorkerDaemon):
    """A daemon of the run `r` with one trainer: it orders jobs, and commits by renaming. spec: of the run; base: of its model."""

    def __init__(self, work: Path, spec: RunSpec) -> None:
        work.mkdir(parents=True, exist_ok=True)
        super().__init__(work / "d.sock", heartbeat_s=0.2)
        self.work, self.spec = work, spec
        self.base: BaseModel | None = None
        self.job = 0
        self._spawn = 0

    def start(self, ready: bool = True) -> None:
        """Start a fresh trainer, and take its Hello and its Ready."""
        self._spawn += 1
        self.config = {"trainer": TrainerConfig(run="r", spec=self.spec, base_digest="base", base=self.base)}
        with (self.work / "trainer.log").open("ab") as log:
            self.launch("trainer", "artd_workers.trainer", self._spawn, env={"OMP_NUM_THREADS": "1"}, log=log)
        hello = self.take(w.Hello)
        assert hello.spawn == self._spawn and "megatron-core" in hello.versions
        if ready:
            self.take(w.Ready)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def log(self) -> str:
        return (self.work / "trainer.log").read_text()

    def take(self, kind: Any, timeout_s: float = 240.0) -> Any:
        try:
            return super().take(kind, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; log:\n{self.log()[-4000:]}") from None

    def marked(self, run: w.Run, least: int, timeout_s: float = 240.0) -> int:
        """Wait for a heartbeat that tells so much progress of a job; what it tells."""
        end = time.monotonic() + timeout_s
        while (made := max((beat.progress for beat in self.beats_of(run)), default=-1)) < least:
            assert time.monotonic() < end, f"{made} marks of {least} within {timeout_s} s; log:\n{self.log()[-4000:]}"
            self.hear(0.1)
        return made

    def beats_of(self, run: w.Run) -> list[w.Beat]:
        return [beat for beat in self.beats if (beat.job, beat.fence) == (run.job, run.fence)]

    def quiet(self, kind: type[Any], seconds: float) -> bool:
        """Whether no message of a kind comes for some seconds."""
        try:
            self.take(kind, seconds)
        except AssertionError:
            return True
        return False

    # ---- jobs ---------------------------------------------------------------------------------------------------------

    def order(self, step: int, parent: w.CheckpointRef | None, batch: rig.WrittenBatch | None, fence: int = 1) -> w.Run:
        """A Run message for the next job."""
        self.job += 1
        files = {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha} if batch else {}
        return w.Run(
            job=self.job, fence=fence, kind="train" if batch else "init", step=step, epoch=step, lineage=0,
            dir=str(self.work / f"staging-{self.job}-{fence}"), instance=INSTANCE, parent=parent, **files,
        )  # fmt: skip

    def staged(self, run: w.Run) -> w.Staged:
        self.send(run)
        self.take(w.Accepted)
        report: w.Staged | w.Failed = self.take((w.Staged, w.Failed))
        assert isinstance(report, w.Staged), f"{report.failure}: {report.error}\n{report.trace}"
        self.drop(w.Staged)
        return report

    def failed(self, run: w.Run) -> w.Failed:
        self.send(run)
        report = self.take((w.Staged, w.Failed))
        assert isinstance(report, w.Failed), f"the job did not fail: {report}"
        self.send(w.Ack(job=run.job, fence=run.fence))
        return report

    def publish(self, run: w.Run, report: w.Staged) -> w.CheckpointRef:
        """Check the folder, rename it, and name it: what a commit does, without telling the worker."""
        folder = Path(report.dir)
        raw = (folder / "manifest.json").read_bytes()
        assert digest(raw) == report.manifest_sha
        manifest = msgspec.json.decode(raw, type=CheckpointManifest)
        assert {entry.name for entry in manifest.files} | {"manifest.json"} == {path.name for path in folder.iterdir()}
        for entry in manifest.files:
            data = (folder / entry.name).read_bytes()
            assert (digest(data), len(data)) == (entry.sha256, entry.bytes)
        assert (manifest.job, manifest.fence, manifest.step) == (run.job, run.fence, run.step)
        assert manifest.parent == (run.parent.sha if run.parent else "") and manifest.batch == run.batch_sha
        target = self.work / f"checkpoint-{run.step}-{run.job}"
        folder.rename(target)
        return w.CheckpointRef(
            run="r", step=run.step, epoch=run.epoch, lineage=0, sha=report.manifest_sha, dir=str(target)
        )

    def commit(self, step: int, parent: w.CheckpointRef | None, batch: rig.WrittenBatch | None) -> w.CheckpointRef:
        """Order, publish, tell."""
        run = self.order(step, parent, batch)
        ref = self.publish(run, self.staged(run))
        self.send(w.Committed(job=run.job, fence=run.fence, checkpoint=ref))
        return ref


def batches(daemon: TrainerDaemon, count: int) -> list[rig.WrittenBatch]:
    """One batch per step, sampled by the policy before it."""
    return [rig.write_batch(daemon.work / "batches", step, epoch=step - 1) for step in range(1, count + 1)]


def files(ref: w.CheckpointRef) -> dict[str, bytes]:
    """Every file of a checkpoint but its manifest, which tells of the job too."""
    return files_in(Path(ref.dir))


def files_in(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def manifest(ref: w.CheckpointRef) -> CheckpointManifest:
    return msgspec.json.decode((Path(ref.dir) / "manifest.json").read_bytes(), type=CheckpointManifest)


def table_of(ref: w.CheckpointRef) -> WeightTable:
    return msgspec.json.decode((Path(ref.dir) / "weights.json").read_bytes(), type=WeightTable)


# ---- live pushes ----------------------------------------------------------------------------------------------------


def push_of(ref: w.CheckpointRef, rendezvous: Path, number: int = 1, fence: int = 1) -> w.Push:
    return w.Push(push=number, fence=fence, checkpoint=ref, mode="merged", source="live", name=f"r@{ref.step}", drain_s=1.0,
                  deadline_s=30.0, rendezvous=str(rendezvous))  # fmt: skip


def receive(group: object, table: WeightTable) -> dict[str, torch.Tensor]:
    """The tensors of a push, each with its hash checked."""
    out = {}
    for entry in table.tensors:
        tensor = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        gloo.broadcast(group, tensor, 20.0)
        assert digest(tensor.view(-1).view(torch.uint8).numpy().tobytes()) == entry.sha256, entry.name
        out[entry.name] = tensor
    return out

"""A daemon of one trainer: a small ROUTER that plays Run, Committed, Fenced and Push, and commits by renaming.

It owns a work folder and the worker process that it starts, one at a time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import zmq

from artd_schema.codec import Codec, digest
from artd_schema.data.base import BaseModel
from artd_schema.data.manifest import CheckpointManifest
from artd_schema.run.spec import RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig

from .rig import WrittenBatch

M = TypeVar("M")


class FakeDaemon:
    """spec: of the run `r`. Every message of the worker but heartbeats is kept until a test asks for its kind."""

    def __init__(self, work: Path, spec: RunSpec) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self.work, self.spec = work, spec
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._endpoint = f"ipc://{work}/d.sock"
        self._router.bind(self._endpoint)
        self._codec: Codec[Any] = Codec(w.FromWorker)
        self._peer = b""
        self._kept: list[Any] = []
        self._spawn = 0
        self.base: BaseModel | None = None
        self.job = 0
        self.beats: list[w.Beat] = []
        self.process: subprocess.Popen[bytes] | None = None

    # ---- the worker's process -----------------------------------------------------------------------------------------

    def start(self, ready: bool = True) -> None:
        """Start a fresh trainer and take its Hello and Ready."""
        self._spawn += 1
        roots = [str(Path(__file__).parents[2] / name) for name in ("schema", "workers")]
        environment = os.environ | {
            "ARTD_SOCKET": self._endpoint, "ARTD_WORKER": "trainer", "ARTD_SPAWN": str(self._spawn), "ARTD_INSTANCE": "i",
            "ARTD_BOOT": "b", "ARTD_BUILD": "x", "PYTHONPATH": os.pathsep.join(roots), "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        with (self.work / "trainer.log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "artd_workers.trainer"], env=environment, stdout=log, stderr=log
            )
        hello = self.expect(w.Hello)
        assert hello.spawn == self._spawn and "megatron-core" in hello.versions
        config = TrainerConfig(run="r", spec=self.spec, base_digest="base", base=self.base)
        self.send(w.Welcome(worker="trainer", heartbeat_s=0.2, max_message=1 << 26, trainer=config))
        if ready:
            self.expect(w.Ready)

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)
        self._kept.clear()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.kill()
        self._context.destroy(linger=0)

    def log(self) -> str:
        return (self.work / "trainer.log").read_text()

    # ---- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self._router.send_multipart([self._peer, *self._codec.encode(message)])

    def expect(self, *kinds: type[M], timeout: float = 240.0) -> M:
        """The next message of one of these kinds. AssertionError with the worker's log at the timeout."""
        end = time.monotonic() + timeout
        while True:
            for index, message in enumerate(self._kept):
                if isinstance(message, kinds):
                    return self._kept.pop(index)
            assert time.monotonic() < end, f"no {kinds} within {timeout} s; log:\n{self.log()[-4000:]}"
            self._take()

    def marked(self, run: w.Run, least: int, timeout: float = 240.0) -> int:
        """Wait for a heartbeat that tells so much progress of a job; what it tells."""
        end = time.monotonic() + timeout
        while (made := max((beat.progress for beat in self.beats_of(run)), default=-1)) < least:
            assert time.monotonic() < end, f"{made} marks of {least} within {timeout} s; log:\n{self.log()[-4000:]}"
            self._take()
        return made

    def beats_of(self, run: w.Run) -> list[w.Beat]:
        return [beat for beat in self.beats if (beat.job, beat.fence) == (run.job, run.fence)]

    def _take(self) -> None:
        """What comes next, if anything does soon."""
        if self._router.poll(100):
            self._peer, *frames = self._router.recv_multipart()
            message, _ = self._codec.decode(frames)
            if isinstance(message, w.Beat):
                self.beats.append(message)
            else:
                self._kept.append(message)

    def quiet(self, kind: type[Any], seconds: float) -> bool:
        """Whether no message of a kind comes for some seconds."""
        try:
            self.expect(kind, timeout=seconds)
        except AssertionError:
            return True
        return False

    # ---- jobs ---------------------------------------------------------------------------------------------------------

    def order(self, step: int, parent: w.CheckpointRef | None, batch: WrittenBatch | None, fence: int = 1) -> w.Run:
        """A Run message for the next job."""
        self.job += 1
        files = {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha} if batch else {}
        return w.Run(
            job=self.job, fence=fence, kind="train" if batch else "init", step=step, epoch=step, lineage=0,
            dir=str(self.work / f"staging-{self.job}-{fence}"), instance="i", parent=parent, **files,
        )  # fmt: skip

    def staged(self, run: w.Run) -> w.Staged:
        self.send(run)
        self.expect(w.Accepted)
        report: w.Staged | w.Failed = self.expect(w.Staged, w.Failed)
        assert isinstance(report, w.Staged), f"{report.failure}: {report.error}\n{report.trace}"
        self._kept = [m for m in self._kept if not isinstance(m, w.Staged)]
        return report

    def failed(self, run: w.Run) -> w.Failed:
        self.send(run)
        report = self.expect(w.Staged, w.Failed)
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

    def commit(self, step: int, parent: w.CheckpointRef | None, batch: WrittenBatch | None) -> w.CheckpointRef:
        """Order, publish, tell."""
        run = self.order(step, parent, batch)
        ref = self.publish(run, self.staged(run))
        self.send(w.Committed(job=run.job, fence=run.fence, checkpoint=ref))
        return ref

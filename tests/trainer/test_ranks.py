"""A trainer of two processes as the daemon starts it: one worker, whose other rank comes through torchrun."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from artd.supervise import procfs
from artd_schema.run.spec import RunSpec, TrainerSpec
from artd_schema.wire import worker as w
from artd_workers.trainer.parallel import launch
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.step.step import NonFinite
from artd_workers.trainer.worker import TrainerWorker
from tests import listening
from tests.awake import LOOK_S, SOON_S, Awake

from . import moe_rig
from .jobs import TrainerDaemon, batches, manifest, spec_for

pytestmark = pytest.mark.torch


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[TrainerDaemon]:
    layout = TrainerSpec(device="cpu", tensor_parallel=2, expert_parallel=2)
    spec = spec_for(moe_rig.folder(tmp_path / "model"), trainer=layout, expert_replay=False)
    fake = TrainerDaemon(tmp_path / "d", spec)
    fake.start()
    yield fake
    fake.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_of_two_ranks(daemon: TrainerDaemon) -> None:
    """Two steps; nothing listens beyond loopback; each death ends them all, and the next trainer goes on from the disk."""
    zero = daemon.commit(0, None, None)
    one, two = batches(daemon, 2)
    first = daemon.commit(1, zero, one)
    second = daemon.commit(2, first, two)
    assert manifest(second).metrics["loss"] != manifest(first).metrics["loss"]
    assert len(family(daemon)) == 3 and listening.listening(family(daemon)), "the ranks are connected somehow"
    assert not listening.beyond_loopback(family(daemon))

    peer = family(daemon)[-1]
    assert killed(daemon, peer) == 1
    assert f"rank 1 (process {peer}) ended, and with it this one" in daemon.log()

    daemon.start()
    again = daemon.commit(2, first, two)
    assert manifest(again).metrics["loss"] == manifest(second).metrics["loss"]
    assert killed(daemon, family(daemon)[1]) == 1, "torchrun itself"

    daemon.start()
    assert killed(daemon, family(daemon)[0]) == -signal.SIGKILL

    daemon.start()
    left, told = family(daemon), len(daemon.log())
    daemon.send(w.Exit(grace_s=5.0))
    assert daemon.process is not None and daemon.process.wait(SOON_S) == 0
    gone(left, within_s=1.0)
    assert "ended, and with it" not in daemon.log()[told:]


def family(daemon: TrainerDaemon) -> list[int]:
    """Process numbers: rank 0, torchrun, rank 1."""
    assert daemon.process is not None
    return [daemon.process.pid, *(stat.pid for stat in procfs.descendants([daemon.process.pid], procfs.all_stats()))]


def killed(daemon: TrainerDaemon, pid: int) -> int:
    """Kill one of the family: rank 0 ends within 2 s, and all others do without a guardian's help. Rank 0's exit status."""
    left = family(daemon)
    os.kill(pid, signal.SIGKILL)
    assert daemon.process is not None
    with Awake() as took:
        status = daemon.process.wait(SOON_S)
    assert took.seconds < 2.0
    gone(left, within_s=10.0)
    daemon.kill()
    return status


def gone(pids: list[int], within_s: float) -> None:
    with Awake() as passed:
        while left := [stat.pid for stat in map(procfs.read_stat, pids) if stat is not None and not stat.dead]:
            assert passed.seconds < within_s, f"{left} still there after {within_s} s"
            time.sleep(LOOK_S)


def test_ranks_out_of_step_are_broken() -> None:
    for ranks, broken in ((Ranks(Parallel(tp=2)), True), (Ranks(), False)):
        with pytest.raises(NonFinite), ranks.in_step(NonFinite):
            raise NonFinite("on all of them")
        assert not ranks.broken
        with pytest.raises(MemoryError), ranks.in_step(NonFinite):
            raise MemoryError("on one of them")
        assert ranks.broken == broken


class Daemon:
    """The daemon's end of a link: answers each report, and sends the job again at once."""

    def __init__(self, run: w.Run) -> None:
        self.run, self.closed, self.reports = run, threading.Event(), []
        self.on_message: Any = None
        self.send, self.progress = (lambda message: None), (lambda: None)
        self.busy, self.idle = (lambda job, fence: None), (lambda: None)

    def report(self, report: w.Failed) -> None:
        self.reports.append(report)
        self.on_message(w.Ack(job=report.job, fence=report.fence), [])
        self.on_message(msgspec.structs.replace(self.run, fence=2), [])


@pytest.mark.parametrize("broken", [True, False])
def test_a_worker_whose_ranks_are_broken_reports_and_ends(tmp_path: Path, broken: bool) -> None:
    trainer = SimpleNamespace(ranks=Ranks(), transfers=lambda: (), discard=lambda: None)
    run = w.Run(job=1, fence=1, kind="init", step=0, epoch=0, lineage=0, dir=str(tmp_path / "x"), instance="i")
    daemon = Daemon(run)
    worker = TrainerWorker(daemon, trainer)
    tried = []

    def fail(*_: object) -> None:
        tried.append(1)
        trainer.ranks.broken = broken
        if len(tried) == 2:
            daemon.closed.set()
        raise RuntimeError("out of memory")

    trainer.run = fail
    worker._todo.put(run)
    assert worker.run() == int(broken) and len(tried) == 2 - broken
    assert [report.failure for report in daemon.reports] == ["transient"] * len(tried)


def test_torchrun_is_told_to_meet_in_a_file(tmp_path: Path) -> None:
    command = launch.torchrun(Parallel(tp=2, ep=4), tmp_path, cuda=True)
    assert "--nproc-per-node=3" in command and "--rdzv-conf=store_type=file" in command
    assert f"--rdzv-endpoint={tmp_path}/torchrun" in command and "--max-restarts=0" in command


def test_one_process_starts_no_other() -> None:
    with launch.start_ranks(Parallel(), cuda=False) as alone:
        assert alone.alone and alone.first and not alone.broken


def test_fewer_gpus_than_ranks_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec(model="m", trainer=TrainerSpec(tensor_parallel=2, pipeline_parallel=2))
    assert launch.layout(spec) == Parallel(tp=2, pp=2)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    with pytest.raises(ValueError, match="takes 4 GPUs for its trainer, and torch sees 3"):
        launch.layout(spec)

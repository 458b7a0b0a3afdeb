"""What a trainer holds in memory after a job that came to nothing: never trained further, never served.

Each fault happens in the second step of a trainer in this process; the same step done after it must have every file of an
undisturbed trainer's, bit for bit.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from artd_schema import crashpoint
from artd_schema.data.manifest import CheckpointManifest
from artd_schema.run.spec import EngineSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer import trainer
from artd_workers.trainer.checkpoint import canary
from artd_workers.trainer.checkpoint.folder import Staging
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.push.ways import Gloo
from artd_workers.trainer.step.step import Cancelled
from artd_workers.trainer.trainer import Trainer
from artd_workers.trainer.worker import TrainerWorker
from artd_workers.transfer.contracts import Port

from . import rig
from .jobs import TrainerDaemon, batches, files, files_in, push_of, spec_for

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
KINDS = [("llama", "lora"), ("tied", "full"), pytest.param(("moe", "full"), marks=pytest.mark.slow)]


class Desk:
    """A trainer in this process; orders and commits as the daemon makes them."""

    def __init__(self, root: Path, spec: RunSpec, port: Port | None = None, ranks: Ranks | None = None) -> None:
        self.root = root
        self.trainer = Trainer(TrainerConfig(run="r", spec=spec, base_digest="base"), {}, ranks, port)
        self._orders = 0

    def order(self, step: int, parent: w.CheckpointRef | None) -> w.Run:
        files = {}
        if parent is not None:
            batch = rig.write_batch(self.root / "batches", step, epoch=step - 1)
            files = {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha}
        self._orders += 1
        return w.Run(
            job=step + 1, fence=self._orders, kind="train" if parent else "init", step=step, epoch=step, lineage=0,
            dir=str(self.root / f"{self._orders}-{step}"), instance="i", parent=parent, **files,
        )  # fmt: skip

    def stage(self, order: w.Run, cancelled: Callable[[], bool] = lambda: False) -> w.CheckpointRef:
        """Do a job; nobody has said that its result is committed."""
        staged = self.trainer.run(order, cancelled=cancelled)
        return w.CheckpointRef(
            run="r", step=order.step, epoch=order.epoch, lineage=0, sha=staged.sha, dir=order.dir
        )  # fmt: skip

    def commit(self, step: int, parent: w.CheckpointRef | None) -> w.CheckpointRef:
        order = self.order(step, parent)
        ref = self.stage(order)
        self.trainer.mark_committed(ref, order.fence)
        return ref


@dataclass(frozen=True)
class Undisturbed:
    """spec: of the run; steps: files of its checkpoints 0, 1, 2 when nothing goes wrong."""

    spec: RunSpec
    steps: list[dict[str, bytes]]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def undisturbed(
    request: pytest.FixtureRequest, toy_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Undisturbed]:
    family, parameters = request.param
    spec = spec_for(toy_folders[family], parameters=parameters, expert_replay=False, engine=EngineSpec(dtype="float32"))
    desk, ref, steps = Desk(tmp_path_factory.mktemp("undisturbed"), spec), None, []
    for step in range(3):
        ref = desk.commit(step, ref)
        steps.append(files(ref))
    yield Undisturbed(spec, steps)
    torch.use_deterministic_algorithms(False)  # a trainer makes its process so for good; tests share theirs


class Planted(Exception):
    """The fault of a test."""


def half_a_step(patch: pytest.MonkeyPatch) -> None:
    """AdamW raises when it has changed every second parameter and its moments."""
    real = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW) -> None:
        for parameter in self.param_groups[0]["params"][::2]:
            parameter.grad = None
        real(self)
        raise Planted

    patch.setattr(torch.optim.AdamW, "step", step)


def after_the_step(patch: pytest.MonkeyPatch) -> None:
    """Every weight is new, and nothing is written."""

    def score(*_: object) -> None:
        raise Planted

    patch.setattr(canary, "score", score)


def half_staged(patch: pytest.MonkeyPatch) -> None:
    """The disk is full at the optimizer's file."""
    real = Staging.tensors

    def tensors(self: Staging, name: str, *rest: object) -> None:
        if name.startswith("optimizer"):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, name, *rest)

    patch.setattr(Staging, "tensors", tensors)


def not_finished(patch: pytest.MonkeyPatch) -> None:
    """All is written but the manifest."""

    def finish(self: Staging, **_: object) -> str:
        raise Planted

    patch.setattr(Staging, "finish", finish)


FAULTS = (half_a_step, after_the_step, half_staged, not_finished)


def holds_nothing(trainer: Trainer, *refs: w.CheckpointRef) -> bool:
    return trainer.resident is None and all(trainer.snapshot_of(ref) is None for ref in refs)


def second_step(tmp_path: Path, made: Undisturbed) -> tuple[Desk, w.CheckpointRef, w.CheckpointRef]:
    """A desk whose memory holds step 1, and checkpoints 0 and 1."""
    desk = Desk(tmp_path, made.spec)
    zero = desk.commit(0, None)
    one = desk.commit(1, zero)
    assert desk.trainer.snapshot_of(one) is not None and desk.trainer.snapshot_of(zero) is None
    return desk, zero, one


def test_an_exception_anywhere_in_a_step_leaves_nothing(tmp_path: Path, undisturbed: Undisturbed) -> None:
    desk, zero, one = second_step(tmp_path, undisturbed)
    for fault in FAULTS:
        with pytest.MonkeyPatch.context() as patch, pytest.raises((Planted, OSError)):
            fault(patch)
            desk.stage(desk.order(2, one))
        assert holds_nothing(desk.trainer, zero, one), fault.__name__
        two = desk.commit(2, one)
        assert files(two) == undisturbed.steps[2], fault.__name__
        assert desk.trainer.snapshot_of(two) is not None


def test_a_cancel_at_every_look_leaves_nothing(tmp_path: Path, undisturbed: Undisturbed) -> None:
    desk, _, one = second_step(tmp_path, undisturbed)
    looks = 0

    def at(number: int) -> Callable[[], bool]:
        left = iter(range(number))
        return lambda: next(left, None) is None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Staging, "finish", lambda *_, **__: "0" * 64)  # it is the end, not the result, that is looked for
        while True:
            try:
                desk.stage(desk.order(2, one), at(looks))
                break
            except Cancelled:
                assert holds_nothing(desk.trainer, one)
                looks += 1
    assert looks >= 2, "rows and the optimizer's step are looked at"
    desk.trainer.discard()
    assert files(desk.commit(2, one)) == undisturbed.steps[2]


def test_what_nobody_committed_is_not_gone_on_from(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """No verdict, Fenced, and a rollback: the next job reads its parent from disk, whichever that is."""
    desk, zero, one = second_step(tmp_path, undisturbed)
    for fenced in (False, True):
        lost = desk.stage(desk.order(2, one))
        if fenced:
            desk.trainer.discard()
        assert holds_nothing(desk.trainer, zero, one, lost) and files(lost) == undisturbed.steps[2]
        assert files(desk.stage(desk.order(2, one))) == undisturbed.steps[2], "a second step on top of a lost one"
    two = desk.commit(2, one)
    assert files(desk.commit(1, zero)) == undisturbed.steps[1], "a rollback went on from memory"
    assert desk.trainer.snapshot_of(two) is None
    assert files(desk.commit(0, None)) == undisturbed.steps[0], "a first checkpoint from weights that were trained"


def test_a_namesake_of_another_lineage_is_not_resident(tmp_path: Path, undisturbed: Undisturbed) -> None:
    desk, _, one = second_step(tmp_path, undisturbed)
    other = msgspec.structs.replace(one, lineage=1, sha="0" * 64)
    assert desk.trainer.snapshot_of(other) is None
    desk.trainer.discard()
    desk.stage(desk.order(2, one))
    desk.trainer.mark_committed(other, 9)  # a late word about another result
    assert holds_nothing(desk.trainer, one, other)


def test_a_snapshot_is_not_what_is_trained(tmp_path: Path, undisturbed: Undisturbed) -> None:
    """A push may still send it while the next job changes every weight."""
    desk, _, one = second_step(tmp_path, undisturbed)
    snapshot = desk.trainer.snapshot_of(one)
    assert snapshot is not None
    before = [tensor.clone() for _, tensor in snapshot.tensors]
    desk.commit(2, one)
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, snapshot.tensors, strict=True))


# ---- through the worker's messages ----------------------------------------------------------------------------------


class Ear:
    """A link that nobody listens to. said: everything that the worker sent."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def send(self, message: object) -> None:
        self.said.append(message)

    report = send

    def busy(self, *_: object) -> None: ...

    def idle(self) -> None: ...

    def progress(self) -> None: ...


class Bench:
    """A worker over a desk's trainer, its link's thread and its main thread being the test."""

    def __init__(self, desk: Desk, patch: pytest.MonkeyPatch) -> None:
        self.ear, self.sent = Ear(), []
        patch.setattr(Gloo, "send", lambda way, message, snapshot, deadline: self.sent.append(message.push))
        self.worker = TrainerWorker(self.ear, desk.trainer)
        self._pushes = 0

    def job(self, order: w.Run) -> w.Staged | w.Failed:
        self.worker._job(order)
        report = self.ear.said[-1]
        assert isinstance(report, w.Staged | w.Failed)
        return report

    def verdict(self, message: w.Committed | w.Fenced | w.Ack) -> None:
        self.worker._take(message, [])

    def offers(self, ref: w.CheckpointRef) -> bool:
        """Whether a live push of this checkpoint would be fed."""
        self._pushes += 1
        self.worker._take(push_of(ref, Path("/nowhere"), self._pushes, self._pushes), [])
        refused = [m.push for m in self.ear.said if isinstance(m, w.Refused)]
        return self._pushes not in refused


def test_nothing_is_offered_to_an_engine_before_committed(
    tmp_path: Path, undisturbed: Undisturbed, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk, zero, one = second_step(tmp_path, undisturbed)
    bench = Bench(desk, monkeypatch)
    assert bench.offers(one) and not bench.offers(zero)
    for fault in (half_a_step, not_finished):
        with pytest.MonkeyPatch.context() as patch:
            fault(patch)
            order = desk.order(2, one)
            assert isinstance(bench.job(order), w.Failed)
        assert not bench.offers(one)
        bench.verdict(w.Ack(job=order.job, fence=order.fence))
        assert not bench.offers(one)
    order = desk.order(2, one)
    report = bench.job(order)
    assert isinstance(report, w.Staged)
    two = w.CheckpointRef(run="r", step=2, epoch=2, lineage=0, sha=report.manifest_sha, dir=report.dir)
    assert not bench.offers(two), "uncommitted weights were offered"
    bench.verdict(w.Fenced(job=order.job, fence=order.fence))
    assert not bench.offers(two) and not bench.offers(one)
    order = desk.order(2, one)
    report = bench.job(order)
    assert isinstance(report, w.Staged) and files_in(Path(report.dir)) == undisturbed.steps[2]
    two = w.CheckpointRef(run="r", step=2, epoch=2, lineage=0, sha=report.manifest_sha, dir=report.dir)
    bench.verdict(w.Committed(job=order.job, fence=order.fence - 1, checkpoint=two))  # of an older attempt
    assert not bench.offers(two)
    bench.verdict(w.Committed(job=order.job, fence=order.fence, checkpoint=two))
    assert bench.offers(two)


# ---- a process that is killed -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_kill_at_every_point_of_a_job_leaves_nothing(
    tmp_path: Path, toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the dead process knew, the next one's step is that of an undisturbed trainer."""
    points = tmp_path / "points"
    points.mkdir()
    monkeypatch.setenv(crashpoint.VARIABLE, str(points))
    daemon = TrainerDaemon(tmp_path / "d", spec_for(toy_folders["llama"]))
    try:
        daemon.start()
        one, two = batches(daemon, 2)
        first = daemon.commit(1, daemon.commit(0, None, None), one)
        expected = files(daemon.commit(2, first, two))
        for point in ("train.accepted", "train.stepped", "stage.files", "stage.manifest"):
            (points / point).write_text("kill")
            daemon.send(daemon.order(2, first, two))
            assert daemon.process is not None and daemon.process.wait(120) == -9, point
            daemon.kill()
            daemon.start()
            assert files(daemon.commit(2, first, two)) == expected, point
    finally:
        daemon.close()


def test_a_metric_without_a_value_is_left_out(
    undisturbed: Undisturbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JSON has no word for it, and the step is a good one."""
    monkeypatch.setattr(trainer, "_rewards", lambda _: {"reward_mean": float("nan"), "reward_std": 0.5})
    desk = Desk(tmp_path, undisturbed.spec)
    made = desk.commit(1, desk.commit(0, None))
    metrics = msgspec.json.decode((Path(made.dir) / "manifest.json").read_bytes(), type=CheckpointManifest).metrics
    assert "reward_mean" not in metrics and metrics["reward_std"] == 0.5

"""Expert replay in a train step and a train job: from the packer's bundle to the experts that were trained."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from artd.packing.batch import pack
from artd.packing.inputs import PackSpec, Source
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.trajectory import Sampling, Turn
from artd_schema.run.spec import LossSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer.batch.replay_bundle import ReplayFiles
from artd_workers.trainer.batch.rows import Batch, BatchError, PackedRow, read_batch
from artd_workers.trainer.model.gradients import gradient_norm
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.step.step import Optimizer, train_step
from artd_workers.trainer.trainer import Trainer

from . import moe_rig, rig
from .moe_rig import SHAPE
from .routes_rig import Written

pytestmark = pytest.mark.torch


def routes_after(tokens: Tensor) -> Tensor:
    """Routes [len, layers, topk] that tell the whole prefix up to each token: what the engine would have said."""
    layers = torch.arange(SHAPE.layers)
    weighted = tokens.long() * (torch.arange(len(tokens)) + 1)
    first = (weighted.cumsum(0)[:, None] * (2 * layers + 1) + 3 * layers) % SHAPE.experts
    return torch.stack([first, (first + 1 + layers) % SHAPE.experts], -1)


def sources(step: int = 1, groups: int = 2) -> list[Source]:
    """Groups of three trajectories; of a sampled last token, routes are told in every second one."""
    generator = torch.Generator().manual_seed(step)
    out = []
    for group in range(1, groups + 1):
        prompt = torch.randint(3, 1024, (66,), generator=generator, dtype=torch.int32)
        for member in range(3):
            tokens = torch.randint(3, 1024, (5 + 2 * member,), generator=generator, dtype=torch.int32)
            logprobs = -6.9 - 0.2 * torch.rand(len(tokens), generator=generator)
            routes = routes_after(torch.cat([prompt, tokens])).to(torch.uint8)
            turn = Turn(
                prompt_ids=prompt.numpy().tobytes(), token_ids=tokens.numpy().tobytes(),
                logprobs=logprobs.numpy().tobytes(), sampling=Sampling(temperature=0.8), policy_epoch=((0, step - 1),),
                routes=(routes if member % 2 else routes[:-1]).numpy().tobytes(),
            )  # fmt: skip
            body = msgspec.msgpack.encode([turn])
            number = 100 * step + 10 * group + member
            out.append(Source(id=number, group=group, reward=float(member), digest=digest(body), body=body))
    return out


def write(folder: Path, step: int = 1, groups: int = 2) -> Written:
    """A batch and its bundle, by the packer; a row for each group."""
    spec = PackSpec(run="r", step=step, seed=0, row_length=128, scale_rewards=True, base_digest="base", routes=SHAPE)
    tensors, manifest, replay = pack(spec, sources(step, groups))
    folder.mkdir(parents=True)
    files = ReplayFiles(folder / "replay.safetensors", folder / "replay.json")
    files.tensors.write_bytes(serialise(replay.tensors))
    files.manifest.write_bytes(to_json(replay.manifest))
    (folder / "batch.safetensors").write_bytes(serialise(tensors))
    (folder / "manifest.json").write_bytes(to_json(manifest))
    return Written(folder / "batch.safetensors", folder / "manifest.json", digest(to_json(manifest)), files)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write(tmp_path_factory.mktemp("packed") / "batch")


@pytest.fixture(scope="module")
def batch(written: Written) -> Batch:
    return written.read(SHAPE)


def prefix_routes(row: PackedRow) -> Tensor:
    """Routes [layers, s, topk] that each token's own prefix asks for: the tokens that it sees, in the order of positions."""
    found = []
    for at in range(len(row.tokens)):
        seen = (~row.hidden_from[at]).nonzero()[:, 0]
        found.append(routes_after(row.tokens[seen])[-1].sort(-1).values)  # as packed
    return torch.stack(found, 1)


def test_every_packed_token_has_its_own_routes(batch: Batch) -> None:
    assert (
        len(batch.rows) == 2 and sum(len(row.tokens) for row in batch.rows) < sum(66 + 5 + 2 * m for m in range(3)) * 2
    )
    uncovered = 0
    for row in batch.rows:
        different = (row.routes.long() != prefix_routes(row)).any(-1).any(0).nonzero()[:, 0].tolist()
        uncovered += len(different)
        assert all(row.routes[:, at].tolist() == [[0, 1]] * SHAPE.layers for at in different)
    assert uncovered == 4  # of the six last tokens, four were never an input
    assert batch.coverage == 1 - 4 / sum(len(row.tokens) for row in batch.rows)


class Weights:
    """Every weight, as an optimizer wants it."""

    def __init__(self, policy: Policy) -> None:
        self.list_parameters = policy.model.named_parameters

    def refresh_weights(self) -> None:
        """Nothing is made of them."""

    def gradient_norm(self) -> float:
        return gradient_norm([parameter for _, parameter in self.list_parameters()])

    def outward(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        return dict(own)

    inward = outward


def stepped(batch: Batch) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and weights after one step from the same start."""
    policy = moe_rig.policy()
    metrics = train_step(policy, Optimizer.make(Weights(policy), OptimizerSpec(lr=1e-3)), batch, LossSpec(), 0)
    return metrics, {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def test_a_step_replays_each_row_and_says_so(batch: Batch) -> None:
    metrics, weights = stepped(batch)
    assert metrics["replay_coverage"] == batch.coverage
    assert metrics["replay_calls"] == SHAPE.layers * len(batch.rows)
    live, others = stepped(replace(batch, coverage=None, rows=tuple(replace(row, routes=None) for row in batch.rows)))
    assert not {"replay_coverage", "replay_calls"} & live.keys() and live["loss"] != metrics["loss"]
    assert any(not torch.equal(weights[name], others[name]) for name in weights)
    again, same = stepped(batch)
    assert again["loss"] == metrics["loss"] and all(torch.equal(weights[name], same[name]) for name in weights)


def test_each_row_of_a_step_goes_to_the_experts_of_its_bundle(batch: Batch) -> None:
    policy, used = moe_rig.policy(), []
    for layer in policy.model.decoder.layers:
        layer.mlp.router.register_forward_hook(lambda router, args, out: used.append(out[1]))
    train_step(policy, Optimizer.make(Weights(policy), OptimizerSpec()), batch, LossSpec(), 0)
    wanted = [routes for row in batch.rows for routes in row.routes.long()]
    assert len(used) == len(wanted)
    for found, routes in zip(used, wanted, strict=True):
        assert torch.equal(found, torch.zeros_like(found).scatter(1, routes, True))


def test_the_loss_is_that_of_each_row_with_its_own_routes(batch: Batch) -> None:
    """A row's routes, put to the other row or shifted by a token, give another loss."""
    policy = moe_rig.policy()
    size = min(len(row.tokens) for row in batch.rows)

    def loss(change) -> float:
        rows = tuple(replace(row, routes=change(index, row.routes)) for index, row in enumerate(batch.rows))
        optimizer = Optimizer.make(Weights(policy), OptimizerSpec(lr=0.0))
        return train_step(policy, optimizer, replace(batch, rows=rows), LossSpec(), 0)["loss"]

    def swapped(index: int, routes: Tensor) -> Tensor:
        out = routes.clone()
        out[:, :size] = batch.rows[1 - index].routes[:, :size]
        return out

    right = loss(lambda _, routes: routes)
    assert right == stepped(batch)[0]["loss"]
    wrong = [loss(swapped), loss(lambda _, r: r.roll(1, 1)), loss(lambda _, r: r.flip(0)), loss(lambda _, r: r + 0)]
    assert right not in wrong[:3] and wrong[3] == right


def test_a_dense_model_takes_no_routes(toy_folders: dict[str, Path], batch: Batch) -> None:
    policy = rig.make_policy(toy_folders["llama"])
    with pytest.raises(ValueError, match="dense"):
        train_step(policy, Optimizer.make(policy.lora, OptimizerSpec()), batch, LossSpec(), 0)
    row = batch.rows[0]
    with pytest.raises(ValueError, match="dense"):
        policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures, row.routes)


# ---- jobs -----------------------------------------------------------------------------------------------------------


def run(
    trainer: Trainer, folder: Path, parent: w.CheckpointRef | None = None, **files: str
) -> tuple[w.CheckpointRef, dict]:
    """Do a job; returns its checkpoint and metrics."""
    step = parent.step + 1 if parent else 0
    job = w.Run(
        job=step + 1, fence=1, kind="train" if parent else "init", step=step, epoch=step, lineage=0, dir=str(folder),
        instance="i", parent=parent, **files,
    )  # fmt: skip
    staged = trainer.run(job)
    return w.CheckpointRef(run="r", step=step, epoch=step, lineage=0, sha=staged.sha, dir=str(folder)), staged.metrics


def trainer_of(model: Path, **changes: object) -> Trainer:
    spec = RunSpec(model=str(model), parameters="full", threads=1, row_length=128, **changes)
    return Trainer(TrainerConfig(run="r", spec=spec, base_digest="base"), {})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_rig.folder(tmp_path_factory.mktemp("model") / "moe")


def job_files(written: Written, replay: bool = True) -> dict[str, str]:
    files = {"batch": str(written.batch), "manifest": str(written.manifest), "batch_sha": written.sha}
    bundle = {"replay": str(written.replay.tensors), "replay_manifest": str(written.replay.manifest)}
    return files | (bundle if replay else {})


def test_a_train_job_replays_its_bundle(model: Path, written: Written, batch: Batch, tmp_path: Path) -> None:
    trainer = trainer_of(model)
    start, _ = run(trainer, tmp_path / "0")
    _, metrics = run(trainer, tmp_path / "1", start, **job_files(written))
    assert metrics["replay_coverage"] == batch.coverage
    assert metrics["replay_calls"] == SHAPE.layers * len(batch.rows)
    with pytest.raises(BatchError, match="expert_replay is on, and the batch has no replay bundle"):
        run(trainer, tmp_path / "2", start, **job_files(written, replay=False))


def test_without_expert_replay_a_job_routes_live(model: Path, written: Written, tmp_path: Path) -> None:
    trainer = trainer_of(model, expert_replay=False)
    start, _ = run(trainer, tmp_path / "0")
    with pytest.raises(BatchError, match="this run replays no experts"):
        run(trainer, tmp_path / "1", start, **job_files(written))
    tensors, described, _ = pack(
        PackSpec(run="r", step=1, seed=0, row_length=128, scale_rewards=True, base_digest="base"),
        [bare(source) for source in sources()],
    )
    (tmp_path / "tensors").write_bytes(serialise(tensors))
    (tmp_path / "manifest").write_bytes(to_json(described))
    files = {"batch": str(tmp_path / "tensors"), "manifest": str(tmp_path / "manifest")}
    sha = digest(to_json(described))
    assert read_batch(Path(files["batch"]), Path(files["manifest"]), sha, 1024).coverage is None
    _, metrics = run(trainer, tmp_path / "2", start, **files, batch_sha=sha)
    assert "replay_calls" not in metrics and metrics["trained_tokens"] == 42


def bare(source: Source) -> Source:
    """The same trajectory without routes."""
    turns = [msgspec.structs.replace(turn, routes=b"") for turn in msgspec.msgpack.decode(source.body, type=list[Turn])]
    body = msgspec.msgpack.encode(turns)
    return replace(source, digest=digest(body), body=body)

"""Every weight trained: gradients, a step by another implementation, files, resume, export; and an adapter's export beside it.

The same through processes that are killed is in test_worker.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.data.manifest import MODEL_FILE, CheckpointManifest
from artd_schema.run.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers.trainer.checkpoint.folder import CheckpointError
from artd_workers.trainer.parameters.trained import AdapterState, FullState, open_model
from artd_workers.trainer.step.objective import Objective, shares
from artd_workers.trainer.step.step import NonFinite, Optimizer, decays, train_step
from artd_workers.trainer.tools.export import export
from artd_workers.trainer.trainer import Trainer
from artd_workers.transfer.merge import BaseWeights, Stored
from tests import toys

from . import rig, test_losses
from .jobs import files_in, spec_for
from .rig import Piece
from .test_parity import TOKENS, all_logits
from .test_tree import PIECES, packed_logprobs, separate_logprobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(300)]


def clones(state: FullState) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.state().items()}


def gradients(state: FullState, loss: Tensor) -> dict[str, Tensor]:
    own = dict(state.list_parameters())
    return state.outward(dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True)))


def make_batch() -> Any:
    generator = torch.Generator().manual_seed(2)
    pieces = [
        Piece(torch.randint(3, 1024, (12,), generator=generator)),
        Piece(torch.randint(3, 1024, (9,), generator=generator), parent=0, trained_from=1, advantage=1.0),
        Piece(torch.randint(3, 1024, (7,), generator=generator), parent=0, trained_from=1, advantage=-0.7),
    ]
    old = -7 - torch.rand(14, generator=generator)
    return rig.batch_of([rig.row_columns(pieces, 32, old)], 2)


# ---- the parameters -------------------------------------------------------------------------------------------------


def test_step_0_is_the_base(folder: Path) -> None:
    """Whatever was in memory before; names and order are the base's, and nothing is left out."""
    _, state = rig.full_policy(folder)
    base = BaseWeights(folder)
    assert sum(parameter.requires_grad for _, parameter in state.list_parameters()) == len(
        list(state.list_parameters())
    )
    with torch.no_grad():
        for _, parameter in state.list_parameters():
            parameter.add_(1)
    state.initialise(seed=9)
    assert list(state.state()) == list(base)
    assert all(torch.equal(tensor, base[name]) for name, tensor in state.state().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_served_is_one_rounding(toy_folders: dict[str, Path], dtype: str) -> None:
    spec = RunSpec(model=str(toy_folders["moe"]), parameters="full", engine=EngineSpec(dtype=dtype))
    _, state = open_model(spec)
    assert isinstance(state, FullState)
    with torch.no_grad():
        for _, parameter in state.list_parameters():
            parameter.mul_(1.01)
    served = list(state.served_tensors())
    assert [name for name, _ in served] == list(BaseWeights(toy_folders["moe"]))
    assert all(torch.equal(tensor, state.state()[name].to(getattr(torch, dtype))) for name, tensor in served)
    before = {name: tensor.clone() for name, tensor in served}
    with torch.no_grad():
        for _, parameter in state.list_parameters():
            parameter.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in served), "training changed a snapshot"


def test_a_bf16_base_is_widened(tmp_path: Path) -> None:
    folder = toys.make(tmp_path / "toy", "qwen3_moe", dtype="bfloat16")
    _, state = rig.full_policy(folder)
    base = BaseWeights(folder)
    assert all(t.dtype == torch.float32 and torch.equal(t, base[n].float()) for n, t in state.state().items())


@pytest.mark.parametrize(("change", "says"), [("missing", "lacks"), ("shape", "the checkpoint has"), ("dtype", "fp32")])
def test_load_refuses_other_weights(toy_folders: dict[str, Path], change: str, says: str) -> None:
    _, state = rig.full_policy(toy_folders["moe"])
    weights, name = clones(state), "model.layers.1.mlp.experts.5.down_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:, :1] if change == "shape" else weights[name].bfloat16()
    with pytest.raises(ValueError, match=says):
        state.load(weights)


def test_without_merged_pushes_there_is_nothing_to_serve(toy_folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="rollout_weights_mode"):
        open_model(RunSpec(model=str(toy_folders["llama"]), parameters="full", rollout_weights_mode="lora"))


# ---- steps ----------------------------------------------------------------------------------------------------------


def test_packed_equals_separate(sparse_folder: Path) -> None:
    """Logprobs and the gradient of every weight, routers among them."""
    policy, state = rig.full_policy(sparse_folder)
    packed, separate = packed_logprobs(policy, rig.only_row(PIECES, 96)), separate_logprobs(policy)
    assert (packed - separate).abs().max() <= 1e-5
    weights = torch.linspace(-1, 1, len(packed))
    found, wanted = gradients(state, (packed * weights).sum()), gradients(state, (separate * weights).sum())
    routers = [name for name in wanted if name.endswith("mlp.gate.weight")]
    assert len(routers) == policy.plan.routes.layers and all(wanted[name].norm() > 1e-4 for name in routers)
    assert max(rig.relative(found[name], wanted[name]) for name in wanted) <= 1e-5


@pytest.mark.parametrize("family", ["tied", "moe", "mixed"])
def test_a_step_is_transformers_step(toy_folders: dict[str, Path], family: str) -> None:
    """Three AdamW steps on a tree, against transformers with each branch on its own. eps is large: where a gradient is
    rounding noise, AdamW's ratio would be noise too."""
    folder, batch, loss = toy_folders[family], make_batch(), LossSpec()
    policy, state = rig.full_policy(folder)
    spec = OptimizerSpec(lr=0.002, eps=1e-3, weight_decay=0.1, clip_grad_norm=0.5)
    optimizer, hf = Optimizer.make(state, spec), rig.reference(folder)
    linears, rest = [], []
    for name, parameter in hf.named_parameters():
        plain = any(part in name for part in ("norm", "embed_tokens", "mlp.gate.weight"))
        (rest if plain else linears).append(parameter)
    groups = [{"params": linears, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=0.002, eps=1e-3, betas=(spec.beta1, spec.beta2))
    row, share = batch.rows[0], shares(batch, loss.normalise)
    for _ in range(3):
        metrics = train_step(policy, optimizer, batch, loss, 0)
        branches = [torch.cat([row.tokens[:12], row.tokens[12:21]]), torch.cat([row.tokens[:12], row.tokens[21:]])]
        logprobs = torch.cat([rig.hf_logprobs(hf, tokens)[12:] for tokens in branches])
        part = Objective(loss).row_loss(row, logprobs, share, batch.sequences)[0]
        assert metrics["loss"] == pytest.approx(part.item(), rel=1e-5)
        theirs.zero_grad()
        part.backward()
        norm = torch.nn.utils.clip_grad_norm_(hf.parameters(), 0.5)
        assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
        theirs.step()
    wanted = rig.per_expert({name: parameter.detach() for name, parameter in hf.named_parameters()})
    moved = {name: (tensor - BaseWeights(folder)[name]) for name, tensor in state.state().items()}
    assert set(moved) == set(wanted) and all(change.any() for change in moved.values())
    worst = max(float((tensor - wanted[name]).abs().max()) for name, tensor in state.state().items())
    assert worst <= 1e-6, worst
    assert max(float(change.abs().max()) for change in moved.values()) > 1e-3


def test_moments_have_the_names_and_layouts_of_weights(toy_folders: dict[str, Path]) -> None:
    """And put back they go on to the same bits."""
    folder, batch = toy_folders["moe"], make_batch()
    policy, state = rig.full_policy(folder)
    optimizer = Optimizer.make(state, OptimizerSpec(lr=0.01))
    fresh = optimizer.state()
    assert int(fresh.pop("step")) == 0 and not any(tensor.any() for tensor in fresh.values())
    for _ in range(2):
        train_step(policy, optimizer, batch, LossSpec(), 0)
    moments, weights = {n: t.clone() for n, t in optimizer.state().items()}, clones(state)
    assert set(moments) == {f"{n}.{kind}" for n in weights for kind in ("exp_avg", "exp_avg_sq")} | {"step"}
    assert all(moments[f"{n}.exp_avg"].shape == tensor.shape for n, tensor in weights.items())
    train_step(policy, optimizer, batch, LossSpec(), 0)
    wanted = clones(state)

    other, again = rig.full_policy(folder)
    again.load(weights)
    resumed = Optimizer.make(again, OptimizerSpec(lr=0.01))
    resumed.load(moments)
    train_step(other, resumed, batch, LossSpec(), 0)
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in again.state().items())
    assert all(torch.equal(tensor, resumed.state()[name]) for name, tensor in optimizer.state().items())
    del moments["model.layers.0.mlp.gate.weight.exp_avg"]
    with pytest.raises(ValueError, match=r"mlp\.gate\.weight"):
        resumed.load(moments)


def test_a_non_finite_gradient_changes_nothing(toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy, state = rig.full_policy(toy_folders["moe"])
    optimizer = Optimizer.make(state, OptimizerSpec(lr=0.1))
    before = clones(state)
    monkeypatch.setattr("artd_workers.trainer.parameters.full.gradient_norm", lambda _: float("nan"))
    with pytest.raises(NonFinite):
        train_step(policy, optimizer, make_batch(), LossSpec(), 0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state.state().items())
    assert int(optimizer.state()["step"]) == 0 and all(
        parameter.grad is None for _, parameter in state.list_parameters()
    )


# ---- jobs, in this process ------------------------------------------------------------------------------------------


class Jobs:
    """A trainer in this process with commits as the daemon makes them."""

    def __init__(self, root: Path, spec: RunSpec) -> None:
        self.root, self.spec = root, spec
        self.trainer = Trainer(TrainerConfig(run="r", spec=spec, base_digest="base"), {})

    def do(self, step: int, parent: w.CheckpointRef | None) -> w.CheckpointRef:
        files = {}
        if parent is not None:
            batch = rig.write_batch(self.root / "batches", step, epoch=step - 1)
            files = {"batch": str(batch.tensors), "manifest": str(batch.manifest), "batch_sha": batch.sha}
        out = self.root / f"{len(list(self.root.iterdir()))}-{step}"
        order = w.Run(job=step, fence=1, kind="train" if parent else "init", step=step, epoch=step, lineage=0, dir=str(out),
                      instance="i", parent=parent, **files)  # fmt: skip
        staged = self.trainer.run(order)
        return w.CheckpointRef(run="r", step=step, epoch=step, lineage=0, sha=staged.sha, dir=str(out))


def make_jobs(root: Path, folder: Path, **changes: object) -> Jobs:
    root.mkdir(exist_ok=True)
    return Jobs(root, spec_for(folder, expert_replay=False, **changes))


@pytest.mark.parametrize("family", ["tied", "moe", "mixed"])
def test_a_full_checkpoint(toy_folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    """What is in the folder; a step made again from it is the step made from memory; the manifest says `full`."""
    base = BaseWeights(toy_folders[family])
    jobs = make_jobs(tmp_path / "a", toy_folders[family], parameters="full")
    zero = jobs.do(0, None)
    assert set(files_in(Path(zero.dir))) == {MODEL_FILE, "optimizer.safetensors", "state.json", "weights.json"}
    manifest = msgspec.json.decode((Path(zero.dir) / "manifest.json").read_bytes(), type=CheckpointManifest)
    assert manifest.parameters == "full"
    stored = load_file(Path(zero.dir) / MODEL_FILE)
    assert set(stored) == set(base) and all(torch.equal(stored[name], base[name]) for name in base)
    table = json.loads((Path(zero.dir) / "weights.json").read_text())
    assert table["mode"] == "merged" and [entry["name"] for entry in table["tensors"]] == list(base)
    jobs.trainer.mark_committed(zero, 1)
    one = jobs.do(1, zero)
    assert jobs.trainer.snapshot_of(one) is None, "uncommitted weights were offered"
    jobs.trainer.mark_committed(one, 1)
    assert jobs.trainer.snapshot_of(one) is not None
    jobs.trainer.discard()
    assert files_in(Path(jobs.do(1, zero).dir)) == files_in(Path(one.dir))
    assert files_in(Path(jobs.do(0, None).dir)) == files_in(Path(zero.dir))


def test_a_damaged_or_foreign_checkpoint_is_named(toy_folders: dict[str, Path], tmp_path: Path) -> None:
    full = make_jobs(tmp_path / "full", toy_folders["moe"], parameters="full")
    adapter = make_jobs(tmp_path / "lora", toy_folders["moe"])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors"):
        adapter.do(1, full.do(0, None))
    zero = full.do(0, None)
    raw = bytearray((Path(zero.dir) / MODEL_FILE).read_bytes())
    raw[-1] ^= 1
    (Path(zero.dir) / MODEL_FILE).write_bytes(raw)
    with pytest.raises(CheckpointError, match=r"model\.safetensors has sha256"):
        full.do(1, zero)


@pytest.mark.parametrize("parameters", ["lora", "full"])
@pytest.mark.parametrize("family", ["llama", "moe", "mixed"])
def test_the_export_is_the_policy(toy_folders: dict[str, Path], tmp_path: Path, family: str, parameters: str) -> None:
    """Loaded by transformers, it scores as the trainer does; every tensor is the one that the engine is served."""
    from transformers import AutoModelForCausalLM

    jobs = make_jobs(tmp_path / "jobs", toy_folders[family], parameters=parameters, optimizer=OptimizerSpec(lr=0.003))
    ref = jobs.do(1, jobs.do(0, None))
    count = export(toy_folders[family], Path(ref.dir), tmp_path / "out", torch.float32)
    served = json.loads((Path(ref.dir) / "weights.json").read_text())["tensors"]
    assert count == len(served) == len(Stored(tmp_path / "out" / MODEL_FILE))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    policy = jobs.trainer._load_policy({})
    trained = jobs.trainer._trained
    assert isinstance(trained, FullState if parameters == "full" else AdapterState)
    with torch.no_grad():
        found, wanted = model(TOKENS[None]).logits[0], all_logits(policy, TOKENS)
        bare = rig.reference(toy_folders[family])(TOKENS[None]).logits[0]
    assert (found - wanted).abs().max() <= 1e-5
    assert (found - bare).abs().max() > 1e-3, "the step changed nothing, so this test tells nothing"


@pytest.mark.parametrize("family", ["llama", "qwen3", "tied", "moe"])
def test_weight_decay_leaves_out_norms_biases_embeddings_and_routers(toy_folders: dict[str, Path], family: str) -> None:
    """Of a batch whose advantages are all zero: there is no gradient, so whatever changes was decayed."""
    policy, state = rig.full_policy(toy_folders[family])
    state.initialise(0)
    before = {name: tensor.clone() for name, tensor in state.state().items()}
    optimizer = Optimizer.make(state, OptimizerSpec(lr=0.1, weight_decay=0.1))
    train_step(policy, optimizer, test_losses.make_batch((0.0, 0.0, 0.0)), LossSpec(), 0)
    changed = {name for name, tensor in state.state().items() if not torch.equal(tensor, before[name])}
    linears = {name for name in before if "_proj." in name or name == "lm_head.weight"}
    assert changed == linears and "model.norm.weight" in before and len(linears) < len(before)
    for name in linears:
        assert torch.allclose(state.state()[name], 0.99 * before[name], rtol=1e-5)


def test_every_matrix_of_an_adapter_decays(toy_folders: dict[str, Path]) -> None:
    policy = rig.make_policy(toy_folders["moe"])
    assert policy.lora is not None and all(decays(name) for name, _ in policy.lora.list_parameters())

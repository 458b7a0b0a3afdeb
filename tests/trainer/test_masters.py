"""Every weight trained where the model computes in bf16: fp32 masters and gradients, one rounding, files that restore the bits.

What a GPU does, here on a CPU with a toy; that it also does it with a GPU's kernels is tools/gpu/full.py.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from artd_schema.data.manifest import MODEL_FILE
from artd_schema.run.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec, TrainerSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer import placement
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model import qkv_split
from artd_workers.trainer.model.model import ALONE, Policy, build
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.parameters.full import FullState
from artd_workers.trainer.parameters.trained import open_model
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.step.objective import Objective, shares
from artd_workers.trainer.step.step import Optimizer, train_step
from artd_workers.transfer.merge import BaseWeights

from . import rig
from .jobs import files_in
from .rig import Piece
from .test_full import make_jobs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
BF16 = Placement(dtype=torch.bfloat16)
GROUPED = Placement(dtype=torch.bfloat16, grouped=True)


def opened(folder: Path, where: Placement) -> tuple[Policy, FullState]:
    plan, base = plan_for(read_config(folder)), BaseWeights(folder)
    policy = Policy(plan, build(plan, base, ALONE, where), None)
    spec = RunSpec(model=str(folder), parameters="full", engine=EngineSpec(dtype="bfloat16"))
    state = FullState(policy, base, spec)
    state.initialise(0)
    return policy, state


def make_batch(rows: int = 2) -> Batch:
    g = torch.Generator().manual_seed(2)
    made = []
    for number in range(rows):
        pieces = [
            Piece(torch.randint(3, 1024, (12,), generator=g)),
            Piece(torch.randint(3, 1024, (9,), generator=g), parent=0, trained_from=1, advantage=1.0 - number),
            Piece(torch.randint(3, 1024, (7,), generator=g), parent=0, trained_from=1, advantage=-0.7),
        ]
        made.append(rig.row_columns(pieces, 32, -7 - torch.rand(14, generator=g)))
    return rig.batch_of(made, 2)


def weights_of(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.model.named_parameters()}


def assert_rounded(policy: Policy, state: FullState) -> None:
    """The model computes with the masters' rounding, and keeps no gradient."""
    found = dict(policy.model.named_parameters())
    assert {name for name, _ in state.list_parameters()} == set(found)
    for name, master in state.list_parameters():
        weight = found[name]
        assert master.dtype == torch.float32 and weight.grad is None
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, master.to(torch.bfloat16)), name


@pytest.mark.parametrize("where", [BF16, GROUPED], ids=["apart", "grouped"])
def test_gradients_are_added_up_in_fp32_and_masters_stepped(toy_folders: dict[str, Path], where: Placement) -> None:
    """Two rows: each one's gradient as the bf16 model gives it, their sum, the norm and AdamW by hand in fp32."""
    folder, batch, spec = toy_folders["moe"], make_batch(), OptimizerSpec(lr=0.01, clip_grad_norm=0.5)
    policy, state = opened(folder, where)
    assert_rounded(policy, state)
    masters = {name: nn_copy(master) for name, master in state.list_parameters()}
    for name, grad in summed(policy, batch).items():
        masters[name].grad = grad
    norm = torch.stack([one.grad.double().square().sum() for one in masters.values()]).sum().sqrt()
    for one in masters.values():
        one.grad.mul_(0.5 / norm)
    betas = spec.beta1, spec.beta2
    torch.optim.AdamW(masters.values(), spec.lr, betas, spec.eps, spec.weight_decay, foreach=False).step()

    before = weights_of(policy)
    metrics = train_step(policy, Optimizer.make(state, spec), batch, LossSpec(), 0)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-9) and norm > 0.5
    assert_rounded(policy, state)
    for name, master in state.list_parameters():
        assert (master - masters[name]).abs().max() <= 1e-7 and master.grad is None, name
        moved = not torch.equal(before[name].float(), master.to(torch.bfloat16).float())
        assert moved or not masters[name].grad.any(), f"{name} has not moved"


def nn_copy(master: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(master.detach().clone())


def summed(policy: Policy, batch: Batch) -> dict[str, Tensor]:
    """Sum over the rows, in fp32, of each row's bf16 gradients."""
    own, loss = dict(policy.model.named_parameters()), LossSpec()
    share, total = shares(batch, loss.normalise), {name: torch.zeros(one.shape) for name, one in own.items()}
    for row in batch.rows:
        scores = policy.score(row.tokens, row.positions, row.until, row.at, row.targets, row.temperatures)
        part = Objective(loss).row_loss(row, scores.logprobs, share, batch.sequences)[0]
        for name, grad in zip(own, torch.autograd.grad(part, list(own.values())), strict=True):
            assert grad.dtype == own[name].dtype
            total[name] += grad.float()
    return total


def test_updates_too_small_for_bf16_add_up(toy_folders: dict[str, Path]) -> None:
    """One step leaves nearly every weight's rounding as it is; its master moves, and steps add up."""
    policy, state = opened(toy_folders["qwen3"], BF16)
    optimizer, name = Optimizer.make(state, OptimizerSpec(lr=1e-6)), "decoder.layers.1.mlp.linear_fc1.weight"
    rounded, start = weights_of(policy)[name], dict(state.list_parameters())[name].detach().clone()
    moved = []
    for _ in range(3):
        train_step(policy, optimizer, make_batch(), LossSpec(), 0)
        moved.append(float((dict(state.list_parameters())[name].detach() - start).abs().mean()))
    assert 2 < moved[2] / moved[0] < 3.1 and moved[0] > 0
    assert (weights_of(policy)[name] == rounded).float().mean() > 0.9


@pytest.mark.parametrize("where", [BF16, GROUPED], ids=["apart", "grouped"])
def test_restored_masters_go_on_to_the_same_bits(toy_folders: dict[str, Path], where: Placement) -> None:
    """From what is on disk, in the names and shapes of the base, whichever way the experts lie."""
    folder, batch, spec = toy_folders["moe"], make_batch(), OptimizerSpec(lr=0.003)
    policy, state = opened(folder, where)
    optimizer = Optimizer.make(state, spec)
    train_step(policy, optimizer, batch, LossSpec(), 0)
    weights = {name: one.clone() for name, one in state.state().items()}
    moments = {name: one.clone() for name, one in optimizer.state().items()}
    base = BaseWeights(folder)
    assert list(weights) == list(base) and all(weights[n].shape == base[n].shape for n in base)
    assert set(moments) == {f"{n}.{kind}" for n in base for kind in ("exp_avg", "exp_avg_sq")} | {"step"}
    assert any(not torch.equal(one, one.bfloat16().float()) for one in weights.values()), (
        "nothing that rounding would lose"
    )

    other, again = opened(folder, where)
    again.load(weights)
    resumed = Optimizer.make(again, spec)
    resumed.load(moments)
    assert_rounded(other, again)
    for one, its in ((policy, optimizer), (other, resumed)):
        train_step(one, its, batch, LossSpec(), 0)
    assert all(torch.equal(one, again.state()[name]) for name, one in state.state().items())
    assert all(torch.equal(one, resumed.state()[name]) for name, one in optimizer.state().items())


def test_masters_are_served_rounded_once(toy_folders: dict[str, Path]) -> None:
    _, state = opened(toy_folders["mixed"], GROUPED)
    with torch.no_grad():
        for _, master in state.list_parameters():
            master.mul_(1.001)
    served = dict(state.served_tensors())
    assert list(served) == list(BaseWeights(toy_folders["mixed"]))
    assert all(torch.equal(one, state.state()[name].bfloat16()) for name, one in served.items())
    kept = {name: one.clone() for name, one in served.items()}
    with torch.no_grad():
        for _, master in state.list_parameters():
            master.zero_()
    assert all(torch.equal(one, kept[name]) for name, one in served.items()), "training changed a snapshot"


def two_steps(folder: Path, where: Placement) -> tuple[list[float], dict[str, Tensor]]:
    """Losses, and the masters after them. eps is large: where a gradient is noise, AdamW's ratio would be noise too."""
    policy, state = opened(folder, where)
    optimizer = Optimizer.make(state, OptimizerSpec(lr=1e-3, eps=1e-3))
    return [train_step(policy, optimizer, make_batch(), LossSpec(), 0)["loss"] for _ in range(2)], state.state()


def test_grouped_experts_are_trained_as_others(toy_folders: dict[str, Path]) -> None:
    """In fp32, where nothing but the order of sums differs."""
    (wanted, weights), (found, others) = (
        two_steps(toy_folders["moe"], one) for one in (placement.CPU, Placement(grouped=True))
    )
    assert found == pytest.approx(wanted, abs=1e-5)
    base = BaseWeights(toy_folders["moe"])
    assert all((weights[n] - others[n]).abs().max() <= 0.01 * (weights[n] - base[n]).abs().max() for n in weights)


def test_bf16_follows_fp32(toy_folders: dict[str, Path]) -> None:
    """A dense model (in a toy with experts a token that is sent elsewhere counts for much)."""
    (wanted, weights), (found, others) = (two_steps(toy_folders["qwen3"], one) for one in (placement.CPU, BF16))
    assert found == pytest.approx(wanted, abs=0.05) and abs(wanted[0] - wanted[1]) > 0.2
    base = BaseWeights(toy_folders["qwen3"])
    ours, theirs = (torch.cat([(w[n] - base[n]).flatten() for n in base]) for w in (weights, others))
    assert rig.relative(theirs, ours) <= 0.2


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_load_refuses_other_weights(toy_folders: dict[str, Path], change: str) -> None:
    _, state = opened(toy_folders["moe"], GROUPED)
    weights, name = state.state(), "model.layers.1.mlp.experts.5.down_proj.weight"
    if change == "missing":
        del weights[name]
    else:
        weights[name] = weights[name][:, :1] if change == "shape" else weights[name].bfloat16()
    with pytest.raises(ValueError, match={"missing": "lacks", "shape": "the checkpoint has", "dtype": "fp32"}[change]):
        state.load(weights)


def test_trained_norms_pass_by_the_kernel_that_has_no_gradient_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, where it is the frozen ones' way."""
    monkeypatch.setattr(qkv_split, "split_plainly", lambda *_: "plain")
    monkeypatch.setattr(qkv_split, "_Split", SimpleNamespace(apply=lambda *_: "kernel"))
    trained, frozen = ([torch.nn.Parameter(torch.ones(2), requires_grad=one)] * 2 for one in (True, False))
    on_gpu, nothing = SimpleNamespace(is_cuda=True), torch.ones(1)
    found = [qkv_split.split(on_gpu, norms, (nothing, nothing), 2, 1e-6) for norms in (trained, frozen, None)]
    assert found == ["plain", "kernel", "kernel"]


def test_a_policy_that_would_not_be_served_is_refused(
    toy_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's weights would not be those that the trainer computes with."""
    monkeypatch.setattr(placement, "of", lambda *_: GROUPED)
    with pytest.raises(ValueError, match=r"engine\.dtype='float32' would serve others: use engine\.dtype='bfloat16'"):
        open_model(RunSpec(model=str(toy_folders["moe"]), parameters="full"))
    with pytest.raises(ValueError, match="context_parallel may be more"):
        Parallel.of(RunSpec(model="/m", parameters="full", trainer=TrainerSpec(tensor_parallel=2)))


def test_jobs_on_a_gpu_s_placement(
    toy_folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through the trainer: the masters on disk, and a step from disk with the files of the step from memory."""
    monkeypatch.setattr(placement, "of", lambda *_: GROUPED)
    jobs = make_jobs(tmp_path / "jobs", toy_folders["moe"], parameters="full", engine=EngineSpec(dtype="bfloat16"))
    zero = jobs.do(0, None)
    jobs.trainer.mark_committed(zero, 1)
    one = jobs.do(1, zero)
    stored = load_file(Path(one.dir) / MODEL_FILE)
    assert all(tensor.dtype == torch.float32 for tensor in stored.values())
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in stored.values())
    jobs.trainer.discard()
    assert files_in(Path(jobs.do(1, zero).dir)) == files_in(Path(one.dir))

"""Every weight trained on one GPU: `python -m tools.gpu.full [--items steps,restore,empty] [--out DIR] [--tiny]`.

Purpose: `steps`: 4 layers of the real shape, two steps in bf16 with fp32 masters beside the same two in fp32, with the same routes;
`restore`: init and two jobs through the trainer (one layer, 32 experts, 8,192 words: a checkpoint of the whole shape is 38 GB),
the checkpoint's bits back in memory, and the second job again in a fresh process; `empty`: the weight gradient of an expert
without tokens. One JSON line each, appended to DIR/full.jsonl. `--tiny`: on a CPU, in small. Needs Megatron-Core, and on a GPU Transformer Engine.
"""

from __future__ import annotations

import gc
import math
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from artd_schema.data.manifest import MODEL_FILE, OPTIMIZER_FILE
from tools.gpu import lines  # first: it sets the environment

import torch  # isort: skip
import msgspec
import torch.nn.functional as F
from torch import Tensor

from artd_schema.run.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec
from artd_schema.wire.worker import CheckpointRef
from artd_workers.models.registry import plan_for
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.checkpoint import folder as checkpoint
from artd_workers.trainer.model.model import Policy, build
from artd_workers.trainer.parallel.layout import ALONE, Parallel
from artd_workers.trainer.parameters.full import FullState
from artd_workers.trainer.parameters.full_sharded import ShardedState
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.step.step import Optimizer, train_step
from artd_workers.transfer.merge import Stored
from tools.gpu import jobs, rows, shape
from tools.gpu.policies import memory, on, settle

LR = 1e-5
LOSS, NORM = 2e-3, 0.05
"""Bounds of bf16 against fp32: of the loss, absolute, and of the gradient's norm, relative."""
WATCHED = ("self_attention.linear_qkv.weight", "self_attention.linear_proj.weight", "self_attention.q_layernorm.weight",
           "self_attention.k_layernorm.weight", "pre_mlp_layernorm.weight", "mlp.router.weight")  # fmt: skip
"""Of layer 0: gradients that are compared, each by a way of its own through the GPU's layers."""


def built(tiny: bool, where: Placement, parallel: Parallel) -> tuple[Policy, shape.RandomWeights]:
    """The model, and the base that it is built from."""
    config = shape.config(2 if tiny else 4, tiny)
    plan = plan_for(config)
    weights = shape.RandomWeights(plan, config, where.device)
    return Policy(plan, build(plan, weights, parallel, where), None, parallel), weights


def opened(tiny: bool, where: Placement, parallel: Parallel) -> tuple[Policy, FullState]:
    policy, weights = built(tiny, where, parallel)
    engine = EngineSpec(dtype="float32" if where.dtype == torch.float32 else "bfloat16")
    kind = FullState if parallel.world == 1 else ShardedState
    state = kind(policy, weights, RunSpec(model="/drawn", parameters="full", engine=engine))
    state.initialise(0)
    return policy, state


def batches(policy: Policy, tiny: bool, count: int = 2) -> list[Batch]:
    """Batches of two groups of 8, with the routes that the untrained routers take."""
    size, vocab = 24 if tiny else 512, policy.plan.vocab_size
    return [
        rows.with_routes(policy, rows.packed(2, 8, size, size, 9 * size + 8, vocab, seed=1 + step))
        for step in range(count)
    ]


def two_steps(
    tiny: bool, name: str, given: list[Batch], parallel: Parallel = ALONE
) -> tuple[list[dict[str, float]], dict[str, Tensor], dict[str, Any]]:
    """Metrics of two steps in a dtype, gradients (this rank's parts) of what is watched at the first, and a line about it all.
    given: the batches; empty: filled."""
    policy, state = opened(tiny, on(tiny, dtype=getattr(torch, name)), parallel)
    given += [] if given else batches(policy, tiny)
    settle(tiny)
    line: dict[str, Any] = {"what": f"two steps in {name}", "layers": policy.plan.layers} | {
        f"loaded_{key}": value for key, value in memory(tiny).items()
    }
    optimizer, metrics, seconds, watched = Optimizer.make(state, OptimizerSpec(lr=LR)), [], [], {}
    for step, batch in enumerate(given):
        started = time.perf_counter()
        metrics.append(train_step(policy, optimizer, batch, LossSpec(), step))
        settle(tiny)
        seconds.append(time.perf_counter() - started)
        if step == 0:
            # AdamW's first moment after one step is the clipped gradient, scaled.
            moments = {key: optimizer.torch.state[master]["exp_avg"] for key, master in state.list_parameters()}
            watched = {key: moments[f"decoder.layers.0.{key}"].cpu() for key in WATCHED}
            still = [key for key, moment in moments.items() if not moment.any()]
            line |= {"parameters": len(moments), "without_gradient": still}
    finite = all(math.isfinite(one["loss"]) and math.isfinite(one["grad_norm"]) for one in metrics)
    line |= {
        "tokens": [sum(len(row.tokens) for row in one.rows) for one in given],
        "seconds": seconds,
        "finite": finite,
    }
    line |= {key: [one[key] for one in metrics] for key in ("loss", "grad_norm", "tokens_per_s")} | memory(tiny)
    weights = [float(one.detach().double().sum()) for one in policy.model.parameters()]
    return metrics, watched, line | {"rounded": rounded(policy, state), "weights": sum(weights)}


def rounded(policy: Policy, state: FullState) -> bool:
    """Whether the model's weights are the masters' rounding, bit for bit; each rank tells of its parts."""
    own = {name: weight.detach() for name, weight in policy.model.named_parameters()}
    if isinstance(state, ShardedState):
        own = {name: state._part(weight) for name, weight in own.items()}
    return all(torch.equal(own[name], master.to(own[name].dtype)) for name, master in state.list_parameters())


def steps(tiny: bool) -> Iterator[dict[str, Any]]:
    given: list[Batch] = []
    found, slopes, line = two_steps(tiny, "bfloat16", given)
    yield line
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    wanted, others, line = two_steps(tiny, "float32", given)
    yield line
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(found, wanted, strict=True))
    norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in zip(found, wanted, strict=True))
    yield {
        "what": "bf16 against fp32", "loss": loss, "loss_bound": LOSS, "grad_norm_relative": norm, "norm_bound": NORM,
        "within": loss <= LOSS and norm <= NORM, "gradients_relative": relative(slopes, others),
    }  # fmt: skip


def relative(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float((found[name] - one).norm() / one.norm().clamp(min=1e-30)) for name, one in wanted.items()}


def restore(tiny: bool) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = shape.config(2, True) if tiny else shape.config(1) | {"num_experts": 32, "vocab_size": 8192}
        spec = jobs.prepare(folder, tiny, config, parameters="full", optimizer=OptimizerSpec(lr=LR))
        trainer = jobs.made(spec)
        yield from jobs.done_by(trainer, folder)
        yield served(folder / "step-2", spec)
        parent = msgspec.json.decode((folder / "parent.json").read_bytes(), type=CheckpointRef)
        trainer.discard()
        seconds: dict[str, float] = {}
        trainer._restore(parent, seconds)
        trained = trainer._trained
        assert isinstance(trained, FullState)
        kept = {MODEL_FILE: trained.state(), OPTIMIZER_FILE: trainer._optimizer.state()}
        equal = {name: same(jobs.stored(Path(parent.dir), name), now) for name, now in kept.items()}
        yield {"what": "step 1 restored, bit for bit", "equal": equal, "seconds": seconds}
        del trainer, trained, kept
        gc.collect()
        yield jobs.again_afresh(folder, MODEL_FILE)


def served(step: Path, spec: RunSpec) -> dict[str, Any]:
    """Every tensor of the weight table against the masters on disk, rounded on the CPU."""
    listed, masters, dtype = jobs.entries(step), Stored(step / MODEL_FILE), getattr(torch, spec.engine.dtype)
    right = sum(checkpoint.is_listed(masters[name].to(dtype), entry) for name, entry in listed.items())
    return {"what": "served tensors rounded again on the CPU", "tensors": len(masters), "equal": right}


def same(stored: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> bool:
    return stored.keys() == now.keys() and all(torch.equal(tensor, now[name]) for name, tensor in stored.items())


def empty(tiny: bool) -> Iterator[dict[str, Any]]:
    """The gradient of an expert that no token went to: zeros, whatever was in memory before."""
    device, count = "cpu" if tiny else "cuda", 64
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        ends = torch.tensor([count, count, 3 * count], dtype=torch.int32, device=device)
        one, two = (torch.ones(3 * count, 128, dtype=dtype, device=device) for _ in range(2))
        # Where the result is likely to be put.
        poison = [torch.full((3, 128, 128), math.nan, dtype=dtype, device=device) for _ in range(4)]
        del poison
        out = F.grouped_mm(one.t(), two, offs=ends)
        found[str(dtype)] = out.float().sum((1, 2)).tolist()
    wanted = [count * 2.0**14, 0.0, count * 2.0**15]
    yield {"what": "weight gradients of three experts, the second without tokens", "wanted": wanted} | found


ITEMS = {"steps": steps, "restore": restore, "empty": empty}

if __name__ == "__main__":
    sys.exit(lines.main("full", ITEMS))

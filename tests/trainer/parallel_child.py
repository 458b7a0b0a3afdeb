"""One rank of a model that is spread over two processes; prints one JSON line: how far it is from one process.

Argument: JSON {rank, store, reference, layouts}. The ranks meet in the FileStore file `store`; `reference` is what torch saved of
one process: {loss: {row}, gradients: {row name: {name: whole gradient}}} of `parallel_rows`. Megatron asks CUDA for the device of
buffers: here that is the CPU, so this process does by a stand-in what a machine with GPUs does by itself.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from torch import Tensor

from artd_workers.trainer.model import Policy
from artd_workers.trainer.parallel import Parallel, part

from . import moe_rig


def main() -> None:
    job = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    initialize_rng_tracker(inference_rng_tracker=True)  # its fork does nothing, and nothing here draws random numbers
    store = dist.FileStore(job["store"], 2)
    dist.init_process_group("gloo", store=store, rank=job["rank"], world_size=2)
    reference = torch.load(job["reference"])
    report = {}
    for name, layout in job["layouts"].items():
        parallel = Parallel(**layout)
        parallel_state.initialize_model_parallel(parallel.tp, expert_model_parallel_size=parallel.ep)
        report[name] = compared(parallel, reference[name], job["rank"])
        parallel_state.destroy_model_parallel()
    print(json.dumps(report), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def compared(parallel: Parallel, reference: dict, rank: int) -> dict[str, float]:
    """Largest relative difference of losses and gradients. Tensor-parallel ranks train all rows, expert-parallel ones share
    them out (each rank is a data-parallel one too)."""
    policy = moe_rig.policy(parallel)
    policy.model.train()
    rows = range(len(moe_rig.ROWS)) if parallel.tp > 1 else [rank]
    with policy.replaying(True) as step:
        losses = [moe_rig.loss(policy, row, moe_rig.FOREIGN[row]) for row in rows]
        for loss in losses:
            loss.backward()
        calls = step.finish()
    wanted = torch.stack([reference["losses"][row] for row in rows])
    found = torch.stack([loss.detach() for loss in losses])
    return {
        "loss": float(((found - wanted) / wanted).abs().max()),
        "gradient": gradient_error(policy, parallel, reference["gradients"]),
        "calls": calls,
    }


def gradient_error(policy: Policy, parallel: Parallel, whole: dict[str, Tensor]) -> float:
    worst, parameters, seen = 0.0, dict(policy.model.named_parameters()), 0
    for name, reference in whole.items():
        own = parallel.own_name(name, moe_rig.SHAPE.experts)
        if own is None:
            continue
        parameter = parameters[own]
        gradient = parameter.grad.clone()
        split = parallel.tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        if not split and own == name and not (".local_experts." in name and parallel.ep > 1):
            # A copy on each rank: what it sees is only its tokens' share of the gradient.
            dist.all_reduce(gradient)
        wanted = part(name, reference, parameter)
        worst = max(worst, float((gradient - wanted).norm() / wanted.norm()))
        seen += 1
    assert seen == len(parameters), "some parameter was not compared"
    return worst


if __name__ == "__main__":
    main()

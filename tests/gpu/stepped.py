"""The same steps by Megatron's optimizer and by artd's: what the item `megatron` of `tests.gpu.sharded` compares.

Purpose: on one of two ranks, a model, batches and AdamW's settings are stepped by artd's `ShardedState`, by it once more, and by
Megatron's DistributedDataParallel and DistributedOptimizer, which put themselves in `train_step` where ours are: forward, loss
and backward are the same code. Owner of: the first way's masters and moments, whole and on the CPU.
Invariants: every rank does the same together; a difference is of this rank's parts, in numbers per whole tensor.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from artd_schema.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec
from artd_workers.trainer.model import Policy
from artd_workers.trainer.packed import Batch
from artd_workers.trainer.sharded import ShardedState
from artd_workers.trainer.step import MOMENTS, Optimizer, train_step
from tests.gpu.policies import memory, settle

CASES = {"bfloat16": ("bfloat16", 0.0), "float32": ("float32", 0.0), "float32, clipped": ("float32", 0.5)}
"""Dtype of the model, and the limit of the gradients' norm (0: none), which is below every step's."""
PARTS = ("master", *MOMENTS)
BOUNDS: dict[str, dict[str, float]] = {
    "bfloat16": {"loss": 1e-5, "grad_norm": 1e-4, "master": 1e-6, "exp_avg": 1e-4, "exp_avg_sq": 2e-4},
    "float32": {"loss": 1e-6, "grad_norm": 1e-5, "master": 1e-6, "exp_avg": 1e-5, "exp_avg_sq": 2e-5},
    "float32, clipped": {"loss": 1e-6, "grad_norm": 1e-5, "master": 1e-6, "exp_avg": 2e-5, "exp_avg_sq": 4e-5},
}
"""How far Megatron's may be on a GPU, the loss absolute and all else relative. Its norm is added up in fp32, ours in fp64, and it clips
to limit / (norm + 1e-6). AdamW is Transformer Engine's kernel there, so a master may have another last digit, which the next gradient
shows; in bf16 that master may be rounded to another weight. Where kernels add up in any order, three times what artd's differ among
themselves is as good. On a CPU all is equal to the bit but the norm, and what clipping by it gives."""
Stretch = tuple[str, str, int, Tensor]
"""Of a flattened tensor: name, which of PARTS, where it begins, the numbers that this rank has."""
Whole = dict[tuple[str, str], Tensor]


class Ours:
    """artd's, with a clock at what is done once the gradients are there."""

    def __init__(self, policy: Policy, base: Any, steps: OptimizerSpec, tiny: bool) -> None:
        kind = str(policy.model.config.params_dtype).removeprefix("torch.")
        spec = RunSpec(model="/drawn", parameters="full", engine=EngineSpec(dtype=kind))
        self.state = ShardedState(policy, base, spec)
        self.state.initialise(0)
        self.optimizer = Optimizer.make(self.state, steps)
        self.seconds: list[float] = []
        for one, name in ((self.state, "gradient_norm"), (self.optimizer, "step")):
            setattr(one, name, timed(getattr(one, name), self.seconds, tiny))

    def train(self, policy: Policy, batch: Batch) -> dict[str, float]:
        return train_step(policy, self.optimizer, batch, LossSpec(), 0)

    def stretches(self) -> Iterator[Stretch]:
        rank = torch.distributed.get_rank()
        for name, master in self.state.named():
            begin, size = rank * len(master), self.state._weights[name].numel()
            for part, tensor in zip(PARTS, self._parts(master), strict=True):
                yield name, part, begin, tensor[: max(0, size - begin)]

    def whole(self) -> Whole:
        """Together."""
        return {
            (name, part): self.state._whole(name, tensor.detach()).flatten().cpu()
            for name, master in self.state.named()
            for part, tensor in zip(PARTS, self._parts(master), strict=True)
        }

    def _parts(self, master: Tensor) -> list[Tensor]:
        return [master.detach(), *(self.optimizer.torch.state[master][key] for key in MOMENTS)]

    def kept(self) -> int:
        """Bytes of gradients between steps."""
        return 4 * sum(one.numel() for one in self.state._sums.values())


class Theirs:
    """Megatron's. For `train_step` it is the optimizer, its set of parameters and torch's optimizer in one."""

    def __init__(self, policy: Policy, _base: Any, steps: OptimizerSpec, tiny: bool) -> None:
        self.spec, self.parameters, self.norms, self.seconds = steps, list[Any](), list[float](), list[float]()
        self.set, self.torch, self._shim = self, self, shim(tiny)
        policy.model.requires_grad_(True)
        self._weights = dict(policy.model.named_parameters())
        # The loss is normalised over the batch before: gradients are summed, not averaged.
        config = copy.copy(policy.model.config)
        config.calculate_per_token_loss = True
        buffers = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=True)
        settings = OptimizerConfig(
            optimizer="adam", lr=steps.lr, weight_decay=steps.weight_decay, adam_beta1=steps.beta1, adam_beta2=steps.beta2,
            adam_eps=steps.eps, clip_grad=steps.clip_grad_norm, bf16=config.bf16, params_dtype=config.params_dtype,
            use_distributed_optimizer=True,
        )  # fmt: skip
        with self._shim():
            self._model = DistributedDataParallel(config, buffers, policy.model)
            # No overrides: norms decay as all else does.
            self._all = get_megatron_optimizer(settings, [self._model], {}, use_gloo_process_groups=False)
            (self._own,) = self._all.chained_optimizers
        self.step = timed(self._step, self.seconds, tiny)

    def train(self, policy: Policy, batch: Batch) -> dict[str, float]:
        metrics = train_step(policy, cast(Optimizer, self), batch, LossSpec(), 0)
        return metrics | {"grad_norm": self.norms[-1]}

    def zero_grad(self, set_to_none: bool) -> None:
        self._model.zero_grad_buffer()
        self._all.zero_grad(set_to_none)

    def gradient_norm(self) -> float:
        """Megatron finds it in its step; here it is not known yet."""
        return 0.0

    def _step(self) -> None:
        with self._shim():
            self._model.finish_grad_sync()
            done, norm, _ = self._all.step()
        assert done and norm is not None
        self.norms.append(float(norm))

    def stretches(self) -> Iterator[Stretch]:
        for name, weight in self._weights.items():
            if weight in self._own.model_param_group_index_map:  # this rank has a part of it
                begin = self._own._get_model_param_range_map(weight)["param"].start
                found = self._own._get_main_param_and_optimizer_states(weight)
                for part in PARTS:
                    yield name, part, begin, found["param" if part == "master" else part].detach()

    def kept(self) -> int:
        """Bytes of gradients between steps."""
        return sum(one.grad_data.nbytes for one in self._model.buffers)


def shim(tiny: bool) -> Callable[[], AbstractContextManager[None]]:
    """What Megatron's optimizer needs where there is no GPU."""
    if not tiny:
        return nullcontext
    from tests.fakes.cuda import cpu_as_cuda

    return cpu_as_cuda


def timed(call: Callable[[], Any], seconds: list[float], tiny: bool) -> Callable[[], Any]:
    def clocked() -> Any:
        settle(tiny)
        started = time.perf_counter()
        found = call()
        settle(tiny)
        seconds.append(time.perf_counter() - started)
        return found

    return clocked


def compared(
    made: Callable[[], tuple[Policy, Any]], given: list[Batch], limit: float, tiny: bool
) -> list[dict[str, Any]]:
    """A line for each way: ours twice, then Megatron's. made: builds the model, and gives its base too."""
    # eps is large: where a gradient is rounding noise, AdamW's ratio would be noise too.
    steps = OptimizerSpec(lr=1e-4, eps=1e-5, weight_decay=0.1, clip_grad_norm=limit)
    whole: Whole = {}
    lines = []
    for name, way in (("artd", Ours), ("artd again", Ours), ("megatron", Theirs)):
        policy, base = made()
        settle(tiny)
        memory(tiny)
        one = way(policy, base, steps, tiny)
        metrics = [one.train(policy, batch) for batch in given]
        line: dict[str, Any] = {"way": name} | {key: [step[key] for step in metrics] for key in ("loss", "grad_norm")}
        clocked = len(one.seconds) // len(given)
        line["step_s"] = [sum(one.seconds[i : i + clocked]) for i in range(0, len(one.seconds), clocked)]
        line |= memory(tiny) | ({} if tiny else {"rest_gb": torch.cuda.memory_allocated() / 1e9})
        line |= {"kept_gradients": one.kept(), "weights": weights(policy)}
        if isinstance(one, Ours) and not whole:
            whole = one.whole()
        lines.append(line | apart(one.stretches(), whole))
        del policy, base, one
        gc.collect()
        if not tiny:
            torch.cuda.empty_cache()
    return lines


def apart(stretches: Iterator[Stretch], whole: Whole) -> dict[str, Any]:
    """By part, sums over this rank's stretches: squares of differences from the first way's numbers, and of these."""
    off, own, elements = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0), 0
    for name, part, begin, tensor in stretches:
        wanted = whole[name, part][begin : begin + len(tensor)].to(tensor.device).double()
        off[part] += float((tensor.double() - wanted).square().sum())
        own[part] += float(wanted.square().sum())
        elements += len(tensor) if part == "master" else 0
    return {"off": off, "own": own, "elements": elements}


def weights(policy: Policy) -> float:
    """Their sum, by which ranks are seen to have the same."""
    return sum(float(one.detach().double().sum()) for one in policy.model.parameters())


def told(case: str, ranks: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """One line for each way, of all ranks, and one that says how far Megatron's is from artd's."""
    first, again, last = (together(each) for each in zip(*ranks, strict=True))
    for line in (first, again, last):
        yield {"what": f"{len(ranks)} processes in {case}"} | line
    noise, off = far(again, first), far(last, first)
    within = {key: off[key] <= max(bound, 3 * noise[key]) for key, bound in BOUNDS[case].items()}
    yield {"what": f"Megatron's against artd's in {case}", "off": off, "bounds": BOUNDS[case], "artd_again": noise} | {
        "within": all(within.values()), "elements_equal": sum(first["elements"]) == sum(last["elements"]),
    }  # fmt: skip


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say of one way."""
    line = dict(ranks[0]) | {key: [one[key] for one in ranks] for key in ("elements", "step_s", "kept_gradients")}
    off, own = ({part: sum(one[key][part] for one in ranks) for part in PARTS} for key in ("off", "own"))
    line |= {"relative": {part: (off[part] / own[part]) ** 0.5 for part in PARTS}}
    return {key: line[key] for key in line if key not in ("off", "own", "weights")} | {
        "weights_equal": len({one["weights"] for one in ranks}) == 1
    }


def far(line: dict[str, Any], first: dict[str, Any]) -> dict[str, float]:
    """How far a way is from the first, by what BOUNDS names."""
    loss, norm = (list(zip(line[key], first[key], strict=True)) for key in ("loss", "grad_norm"))
    steps = {"loss": max(abs(a - b) for a, b in loss), "grad_norm": max(abs(a / b - 1) for a, b in norm)}
    return steps | line["relative"]

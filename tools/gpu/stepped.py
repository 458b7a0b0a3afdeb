"""The same steps by Megatron's optimizer and by artd's: what the items `megatron` and `nudged` of `tools.gpu.sharded` compare.

Purpose: on each rank, a model, batches and AdamW's settings are stepped by artd's `ShardedState`, by it with nudged masters, and by
Megatron's DistributedDataParallel and DistributedOptimizer, which put themselves in `train_step` where ours are: forward, loss
and backward are the same code. Owner of: the first way's masters and moments after its first and last step, on the CPU.
Invariants: every rank does the same together; a difference is of this rank's parts, in numbers per whole tensor.
"""

from __future__ import annotations

import copy
import gc
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import msgspec
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate
from torch import Tensor

from artd_schema.run.spec import EngineSpec, LossSpec, OptimizerSpec, RunSpec
from artd_workers.trainer.batch.rows import Batch
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.parameters.full_sharded import ShardedState
from artd_workers.trainer.step.step import MOMENTS, Optimizer, decays, train_step
from tools.gpu.policies import memory, settle

CASES = {"bfloat16": ("bfloat16", 0.0), "float32": ("float32", 0.0), "float32, clipped": ("float32", 0.5)}
"""Dtype of the model, and the limit of the gradients' norm (0: none), which is below every step's."""
PARTS = ("master", *MOMENTS)
BOUNDS = {"loss": 1e-6, "grad_norm": 1e-6, "master": 1e-6, "exp_avg": 1e-6, "exp_avg_sq": 2e-6}
"""What roundings give from the same weights and gradients, the loss absolute and all else relative. Megatron's norm is added up in
fp32, ours in fp64, and it clips to limit / (norm + 1e-6); on a GPU its AdamW is Transformer Engine's kernel, which rounds elsewhere.
After the first step these hold, of masters and moments in every tensor. From then on other last digits of masters grow through
forward and backward (in bf16, where a weight is rounded to another one): after the last step what they grow to is allowed too."""
TIMES = 3
"""How many times the nudged runs' difference is allowed: a loss is one number, and has luck."""
ARTD, NUDGED, MEGATRON, WRONG = "artd", "artd, nudged", "megatron", "megatron, weight decay twice"
NUDGES = (1, 2)
EVERY = 61
"""On a GPU one element in so many is compared; a prime, so that it walks through rows."""
Stretch = tuple[str, str, int, Tensor]
"""Of a flattened tensor: name, which of PARTS, where it begins, the numbers that this rank has."""
Whole = dict[tuple[str, str], Tensor]
Made = Callable[[], tuple[Policy, Any]]
Apart = dict[str, dict[str, tuple[float, float]]]
"""By part and name: sums of squares of differences from the first way's numbers, and of these."""


class Ours:
    """artd's, with a clock at what is done once the gradients are there."""

    def __init__(self, steps: OptimizerSpec, tiny: bool, policy: Policy, base: Any) -> None:
        kind = str(policy.model.config.params_dtype).removeprefix("torch.")
        spec = RunSpec(model="/drawn", parameters="full", engine=EngineSpec(dtype=kind))
        self.state = ShardedState(policy, base, spec)
        self.state.initialise(0)
        self.optimizer = Optimizer.make(self.state, steps)
        self.adam = type(self.optimizer.torch)
        self.seconds: list[float] = []
        for one, name in ((self.state, "gradient_norm"), (self.optimizer, "step")):
            setattr(one, name, timed(getattr(one, name), self.seconds, tiny))

    def train(self, policy: Policy, batch: Batch) -> dict[str, float]:
        return train_step(policy, self.optimizer, batch, LossSpec(), 0)

    def stretches(self) -> Iterator[Stretch]:
        rank = torch.distributed.get_rank()
        for name, master in self.state.list_parameters():
            begin, size = rank * len(master), self.state._weights[name].numel()
            for part, tensor in zip(PARTS, self._parts(master), strict=True):
                yield name, part, begin, tensor[: max(0, size - begin)]

    def whole(self, every: int) -> Whole:
        """One element in `every`, together."""
        return {
            (name, part): self.state._whole(name, tensor.detach()).flatten()[::every].cpu()
            for name, master in self.state.list_parameters()
            for part, tensor in zip(PARTS, self._parts(master), strict=True)
        }

    def _parts(self, master: Tensor) -> list[Tensor]:
        return [master.detach(), *(self.optimizer.torch.state[master][key] for key in MOMENTS)]

    def kept(self) -> int:
        """Bytes of gradients between steps."""
        return 4 * sum(one.numel() for one in self.state._sums.values())


class Nudged(Ours):
    """artd's, but after the first step each master is moved to the next fp32 number above or below: what one other rounding,
    which any other AdamW has, grows to."""

    def __init__(self, seed: int, *given: Any) -> None:
        super().__init__(*given)
        self._seed: int | None = seed

    def train(self, policy: Policy, batch: Batch) -> dict[str, float]:
        metrics = super().train(policy, batch)
        if self._seed is not None:
            self._nudge(100 * self._seed + torch.distributed.get_rank())
            self._seed = None
        return metrics

    @torch.no_grad()
    def _nudge(self, seed: int) -> None:
        generator = torch.Generator(next(self.state.list_parameters())[1].device).manual_seed(seed)
        for _, master in self.state.list_parameters():
            draw = torch.rand(len(master), generator=generator, device=master.device)
            master.copy_(master.nextafter(torch.where(draw < 0.5, -math.inf, math.inf)))
        self.state.refresh_weights()


class Theirs:
    """Megatron's. For `train_step` it is the optimizer, its set of parameters and torch's optimizer in one."""

    def __init__(self, steps: OptimizerSpec, tiny: bool, policy: Policy, _base: Any) -> None:
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
            spared = ParamWithNamePredicate(name="spared", fn=lambda _, name: not decays(name))
            overrides = {ParamKey(with_name_predicate=spared): {"wd_mult": 0.0}}
            self._all = get_megatron_optimizer(settings, [self._model], overrides, use_gloo_process_groups=False)
            (self._own,) = self._all.chained_optimizers
            # Megatron's scheduler, which there is none of here, would do this before each step.
            for group in self._own.param_groups:
                group["weight_decay"] = steps.weight_decay * group["wd_mult"]
        self.adam = type(self._own.optimizer)
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


def compared(made: Made, given: list[Batch], limit: float, tiny: bool) -> list[dict[str, Any]]:
    """A line for each way, artd's first. made: builds the model, and gives its base too."""
    # eps is large: where a gradient is rounding noise, AdamW's ratio would be noise too. The betas are exact in fp32: Transformer
    # Engine keeps them so, and 1 - 0.999 would be off by 1.3e-5 of itself.
    steps = OptimizerSpec(lr=1e-4, beta1=1 - 2**-3, beta2=1 - 2**-10, eps=1e-5, weight_decay=0.1, clip_grad_norm=limit)
    twice = msgspec.structs.replace(steps, weight_decay=2 * steps.weight_decay)
    ways: dict[str, Callable[[Policy, Any], Ours | Theirs]] = {ARTD: partial(Ours, steps, tiny)}
    ways |= {f"{NUDGED} {seed}": partial(Nudged, seed, steps, tiny) for seed in NUDGES}
    ways |= {MEGATRON: partial(Theirs, steps, tiny), WRONG: partial(Theirs, twice, tiny)}
    wanted: dict[str, Whole] = {}
    return [{"way": name} | walked(made, way, given, wanted, tiny) for name, way in ways.items()]


def walked(
    made: Made, way: Callable[[Policy, Any], Ours | Theirs], given: list[Batch], wanted: dict[str, Whole], tiny: bool
) -> dict[str, Any]:
    """All steps of one way. wanted: the first way's numbers after its first and last step; empty: this is it, and fills it."""
    every, own, metrics, off = 1 if tiny else EVERY, not wanted, list[dict[str, float]](), dict[str, Apart]()
    policy, base = made()
    settle(tiny)
    memory(tiny)
    one = way(policy, base)
    for batch in given:
        metrics.append(one.train(policy, batch))
        if when := {1: "first", len(given): "last"}.get(len(metrics)):
            if own and isinstance(one, Ours):
                wanted[when] = one.whole(every)
            off[when] = apart(one.stretches(), wanted[when], every)
    line: dict[str, Any] = {key: [step[key] for step in metrics] for key in ("loss", "grad_norm")}
    clocked = len(one.seconds) // len(given)
    line["step_s"] = [sum(one.seconds[i : i + clocked]) for i in range(0, len(one.seconds), clocked)]
    line |= memory(tiny) | ({} if tiny else {"rest_gb": torch.cuda.memory_allocated() / 1e9})
    line |= {"kept_gradients": one.kept(), "weights": weights(policy), "apart": off}
    line["adam"] = f"{one.adam.__module__}.{one.adam.__name__}"
    line["elements"] = sum(len(tensor) for _, part, _, tensor in one.stretches() if part == "master")
    for weight in policy.model.parameters():
        # Through these hooks, which the collector does not follow, a weight keeps its masters and itself.
        (weight._post_accumulate_grad_hooks or {}).clear()
    del policy, base, one, weight
    gc.collect()
    if not tiny:
        torch.cuda.empty_cache()
    return line


def apart(stretches: Iterator[Stretch], whole: Whole, every: int) -> Apart:
    """This rank's stretches against what `whole` has of them: one element in `every`."""
    sums: Apart = {part: {} for part in PARTS}
    for name, part, begin, tensor in stretches:
        found = tensor[-begin % every :: every].double()
        start = -(-begin // every)
        wanted = whole[name, part][start : start + len(found)].to(found.device).double()
        sums[part][name] = (float((found - wanted).square().sum()), float(wanted.square().sum()))
    return sums


def weights(policy: Policy) -> float:
    """Their sum, by which ranks are seen to have the same."""
    return sum(float(one.detach().double().sum()) for one in policy.model.parameters())


def told(case: str, ranks: Sequence[list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    """One line for each way, of all ranks, one that says how far Megatron's is from artd's, and one that this would tell."""
    ways = {line["way"]: line for line in (together(each) for each in zip(*ranks, strict=True))}
    for line in ways.values():
        yield {"what": f"{len(ranks)} {'processes' if len(ranks) > 1 else 'process'} in {case}"} | line
    off = {way: far(line, ways[ARTD]) for way, line in ways.items()}
    nudged = [one["last"] for way, one in off.items() if way.startswith(NUDGED)]
    grown = {key: max(bound, TIMES * max(one[key] for one in nudged)) for key, bound in BOUNDS.items()}
    allowed = {"first": BOUNDS, "last": grown}
    yield {"what": f"Megatron's against artd's in {case}", "off": off[MEGATRON], "allowed": allowed} | {
        "within": within(off[MEGATRON], allowed),
        "elements_equal": sum(ways[ARTD]["elements"]) == sum(ways[MEGATRON]["elements"]),
    }
    caught = not within(off[WRONG], allowed)
    yield {"what": f"the same with twice the weight decay in {case}", "off": off[WRONG], "caught": caught}


Far = dict[str, dict[str, float]]
"""After the first and the last step, by what BOUNDS names."""


def within(off: Far, allowed: Mapping[str, Mapping[str, float]]) -> bool:
    return all(off[when][key] <= most for when, each in allowed.items() for key, most in each.items())


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks say of one way; of differences, after the first step the worst tensor's, after the last all tensors'."""
    line = dict(ranks[0]) | {key: [one[key] for one in ranks] for key in ("elements", "step_s", "kept_gradients")}
    line["weights_equal"] = len({one["weights"] for one in ranks}) == 1
    first, last = (
        {part: added([one["apart"][when][part] for one in ranks]) for part in PARTS} for when in ("first", "last")
    )
    line["first"] = {part: max(relative(*sums) for sums in each.values()) for part, each in first.items()}
    line["last"] = {part: relative(*map(sum, zip(*each.values(), strict=True))) for part, each in last.items()}
    return {key: line[key] for key in line if key not in ("apart", "weights")}


def added(ranks: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """By name, sums over ranks, of which not each has a part of every tensor."""
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for one in ranks:
        for name, (off, own) in one.items():
            sums[name] = [sums[name][0] + off, sums[name][1] + own]
    return sums


def relative(off: float, own: float) -> float:
    return math.sqrt(off / own) if own else math.inf if off else 0.0


def far(line: dict[str, Any], first: dict[str, Any]) -> Far:
    """How far a way is from the first."""
    loss = [abs(a - b) for a, b in zip(line["loss"], first["loss"], strict=True)]
    norm = [abs(a / b - 1) for a, b in zip(line["grad_norm"], first["grad_norm"], strict=True)]
    return {
        "first": {"loss": loss[0], "grad_norm": norm[0]} | line["first"],
        "last": {"loss": max(loss), "grad_norm": max(norm)} | line["last"],
    }

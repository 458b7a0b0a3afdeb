"""Measures what is lost when an adapter is merged into weights of the engine's dtype: `merge_*` of a train job's metrics.

Small updates vanish when W + (alpha/r) B A is rounded: a bf16 weight keeps its value until an update exceeds 1/512 to 1/256 of
it (fp32 masters solve the same problem in training: Micikevicius et al., Mixed Precision Training, arXiv:1710.03740, section
3.1). For all adapted weights W with Delta = (alpha/r) B A, served S = round(W + Delta) and R = round(W), with each element
counted once:

    merge_changed = number of S != R / number of elements
    merge_served  = sum of (S - R) Delta / sum of Delta Delta      (the projection of what is served on the exact update)
    merge_kl      = mean over a row's tokens of KL(adapter || merged), in nats, over the whole vocabulary

A measurement leaves the policy unchanged, also after an error. One layer's merged weights are in memory at a time. B A is one
product in fp32, so about one in 10^5 roundings may differ from those of `merge`, which multiplies in its own order. Collective:
all ranks of a model measure together, and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn

from artd_schema.run.spec import RunSpec
from artd_workers.trainer.model.model import Policy
from artd_workers.transfer.merge import explain_rounding

from . import canary
from .canary import Row

_CHUNK = 1 << 26
"""Elements merged at a time, unless one matrix has more: this takes a few fp32 buffers of 256 MiB."""


def metrics(policy: Policy, base: Mapping[str, Tensor], spec: RunSpec) -> dict[str, float]:
    """Return `measure` of the canary's prompts, or nothing if the engine does not get rounded weights.

    It also returns nothing if the model does not hold the stored base weights, from which the served weights are made.
    It costs one pass over the adapted weights and two forwards of the canary's 128 tokens.
    """
    if spec.parameters != "lora" or spec.rollout_weights_mode != "merged" or spec.engine.dtype == "float32":
        return {}
    if explain_rounding(base, {policy.model.config.params_dtype}):
        return {}
    return measure(policy, getattr(torch, spec.engine.dtype), canary.row(policy.plan))


@torch.no_grad()
def measure(policy: Policy, dtype: torch.dtype, row: Row) -> dict[str, float]:
    """Return merge_changed, merge_served (left out where the adapter changes nothing) and merge_kl of a policy with an adapter.

    `dtype`: the engine's, to which every weight is rounded, also one without an adapter. `row`: the tokens for the KL. Both
    policies compute in the trainer's dtype and route live, so the rounding of the trainer's activations alone gives merge_kl a
    lower limit.
    """
    exact = logprobs(policy, row)
    served = _Served(dtype)
    with served.instead(policy.model):
        rounded = logprobs(policy, row)
    changed, along, square, elements = served.sums()
    found = {"merge_changed": changed / elements}
    if square:
        found["merge_served"] = along / square
    return found | {"merge_kl": divergence(exact, rounded)}


def logprobs(policy: Policy, row: Row) -> Tensor:
    """Return the logprobs of every token of the vocabulary, fp64 [rows, vocab]."""
    return policy.logits(row.tokens, row.positions, row.seen, row.rows).double().log_softmax(-1)


def divergence(one: Tensor, two: Tensor) -> float:
    """Return KL(one || two) of logprobs [rows, vocab], in nats, the mean over the rows."""
    return float((one.exp() * (one - two)).sum(-1).mean())


class _Served:
    """Replaces a model's weights by those that an engine would serve, and counts while it merges."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._counts: list[Tensor] = []

    def sums(self) -> list[float]:
        """Return sums over all adapted elements of the whole model: how many changed, (S - R) Delta, Delta Delta, and their
        number.

        Collective: every rank calls it.
        """
        total = torch.stack(self._counts).sum(0)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)
        return total.tolist()

    @contextmanager
    def instead(self, model: nn.Module) -> Iterator[None]:
        """Make a forward of the model use served weights and no adapter.

        A layer's weights are replaced while it runs, all other weights throughout.
        """
        layers = {layer: dict(layer.named_modules(prefix="layer")) for layer in model.decoder.layers}
        inner = {module for modules in layers.values() for module in modules.values()}
        with ExitStack() as now, ExitStack() as whole:
            whole.enter_context(self._replace({path: one for path, one in model.named_modules() if one not in inner}))

            def before(layer: nn.Module, _args: Any) -> None:
                now.enter_context(self._replace(layers[layer]))

            def after(_layer: nn.Module, _args: Any, _output: Any) -> None:
                now.close()

            for layer in layers:
                whole.callback(layer.register_forward_pre_hook(before).remove)
                whole.callback(layer.register_forward_hook(after).remove)
            yield

    @contextmanager
    def _replace(self, modules: Mapping[str, nn.Module]) -> Iterator[None]:
        """Replace the parameters that these modules own by served ones. `modules`: by path in the model."""
        adapters = {one: adapter for one in modules.values() if (adapter := getattr(one, "adapter", None)) is not None}
        own = {id(parameter) for adapter in adapters.values() for parameter in adapter.parameters()}
        kept: list[tuple[nn.Parameter, Tensor]] = []
        try:
            for path, module in modules.items():
                for parameter in module.parameters(recurse=False):
                    if id(parameter) in own:
                        continue
                    kept.append((parameter, parameter.data))
                    if module in adapters:
                        parameter.data = self._merge(parameter.data, adapters[module], ".experts." in path)
                    else:
                        parameter.data = parameter.data.to(self._dtype).to(parameter.dtype)
                if module in adapters:
                    module.adapter = None  # type: ignore[assignment]
            yield
        finally:
            for parameter, data in kept:
                parameter.data = data
            for module, adapter in adapters.items():
                module.adapter = adapter

    def _merge(self, weight: Tensor, adapter: Any, expert: bool) -> Tensor:
        """Merge a weight [out, in] or [experts, out, in] with its adapter, as served. Returns it in its own dtype."""
        state = parallel_state
        # Ranks that hold the same part each count their share of it.
        copies = state.get_expert_data_parallel_world_size() if expert else state.get_data_parallel_world_size(True)
        a, b = adapter.compute_join(torch.float32)
        out = torch.empty_like(weight)
        one = weight.ndim == 2
        stacks = tuple(tensor[None] if one else tensor for tensor in (weight, a, b, out))
        step = max(1, _CHUNK // stacks[0][0].numel())
        for pieces in zip(*(stack.split(step) for stack in stacks), strict=True):
            self._counts.append(self._piece(*pieces) / copies)
        return out

    def _piece(self, weight: Tensor, a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        """Fill `out` with the merged weight. Returns what `sums` adds up, fp64."""
        weight, update = weight.float(), torch.bmm(b, a)
        before, served = weight.to(self._dtype), (weight + update).to(self._dtype)
        moved = served.float() - before.float()
        out.copy_(served)
        number = torch.full((), out.numel(), device=out.device)
        sums = (served != before).sum(), _inner(moved, update), _inner(update, update), number
        return torch.stack([one.double() for one in sums])


def _inner(one: Tensor, two: Tensor) -> Tensor:
    """Return the sum of products: within a line in fp32, over the lines in fp64."""
    return (one * two).sum(-1).sum(dtype=torch.float64)

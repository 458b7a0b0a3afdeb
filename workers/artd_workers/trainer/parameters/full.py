"""Trains every weight of a model: fp32 masters and, on a GPU, the rounded weights that the model computes with.

`FullState` is a run's `Trained` and also its `ParameterSet`, in Megatron's layout. It owns the masters. What is stored, clipped
and stepped is fp32. Where the model computes in fp32, its weights are the masters; where it computes in bf16, they are the
masters' rounding, made again after each change. A weight's gradients are summed in fp32, row by row, and are never kept beside
the weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from artd_schema.data.manifest import MODEL_FILE, WeightEntry
from artd_schema.run.spec import Parameters, RunSpec
from artd_workers.trainer.checkpoint.folder import Staging
from artd_workers.trainer.model.experts.grouped import EXPERT, apart
from artd_workers.trainer.model.gradients import gradient_norm
from artd_workers.trainer.model.model import Policy
from artd_workers.transfer.merge import merged_tensors


class FullState:
    """Every weight of a policy without adapter."""

    kind: Parameters = "full"
    file = MODEL_FILE
    views = False

    def __init__(self, policy: Policy, base: Mapping[str, Tensor], spec: RunSpec) -> None:
        """Make the weights of `policy` require gradients; `initialise` or `load` sets them.

        Raises ValueError when the run cannot be served.
        """
        rounded = policy.model.config.params_dtype != torch.float32
        if spec.rollout_weights_mode != "merged":
            raise ValueError("parameters='full' has no adapter to serve: use rollout_weights_mode='merged'")
        if rounded and spec.engine.dtype == "float32":
            raise ValueError(
                "parameters='full' with trainer.dtype='bfloat16' computes with rounded weights, and engine.dtype='float32' "
                "would serve others: use engine.dtype='bfloat16', or trainer.dtype='float32'"
            )
        self._model, self._codec, self.base, self._spec = policy.model, policy.plan.codec, base, spec
        self._weights = _owners(policy)
        policy.model.requires_grad_(True)
        self._masters = self._make_masters(rounded)

    def _make_masters(self, rounded: bool) -> dict[str, nn.Parameter]:
        """Return the masters by name. `rounded`: the model's own weights are rounded and cannot be masters."""
        return {name: _master(one) if rounded else one for name, one in self._weights.items()}

    @property
    def parameters(self) -> FullState:
        return self

    # ---- what the optimizer works on ----------------------------------------------------------------------------------

    def list_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self._masters.items()

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(self._codec.to_hf(apart(self._model, own)))
        return {name: found[name] for name in self.base}

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        own = {name: torch.empty(weight.shape) for name, weight in self._weights.items()}
        self._fill(own, stored)
        return own

    def gradient_norm(self) -> float:
        return gradient_norm(list(self._masters.values()))

    @torch.no_grad()
    def refresh_weights(self) -> None:
        for name, weight in self._weights.items():
            if weight is not self._masters[name]:
                weight.copy_(self._masters[name])

    # ---- in checkpoints and engines -----------------------------------------------------------------------------------

    def initialise(self, seed: int) -> None:
        self._set(self.base)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if odd := [name for name, tensor in tensors.items() if tensor.dtype != torch.float32]:
            raise ValueError(f"{odd[0]} is {tensors[odd[0]].dtype}, and full parameters are kept in fp32")
        self._set(tensors)

    def collect(self) -> None:
        """Do nothing: one process has all parameters."""

    def release(self) -> None:
        """Do nothing: `collect` brought nothing."""

    def state(self) -> dict[str, Tensor]:
        """Return the masters on the CPU, without gradient, by Hugging Face names in the base's order; not all are copies."""
        return self.outward({name: master.detach().cpu() for name, master in self._masters.items()})

    def stage(self, staging: Staging) -> None:
        staging.tensors(MODEL_FILE, self.state())

    def held_entries(self) -> tuple[WeightEntry, ...]:
        return ()  # there is no adapter

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        dtype = getattr(torch, self._spec.engine.dtype)
        # Round on the device, so that a GPU sends half the bytes. The result is a copy in any case, because training goes on.
        own = {name: master.detach().to(dtype).cpu() for name, master in self._masters.items()}
        return merged_tensors(self.outward(own), {}, 1.0, dtype)

    @torch.no_grad()
    def _set(self, tensors: Mapping[str, Tensor]) -> None:
        self._fill({name: master.detach() for name, master in self._masters.items()}, tensors)
        self.refresh_weights()

    def _fill(self, own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors with Hugging Face names into own ones. Raises ValueError when names or shapes differ."""
        slots = apart(self._model, own)
        for name, tensor in self._codec.to_megatron(tensors):
            if tensor.shape != slots[name].shape:
                raise ValueError(
                    f"{name}: the checkpoint has {tuple(tensor.shape)}, config.json says {tuple(slots[name].shape)}"
                )
            slots[name].copy_(tensor)


def _owners(policy: Policy) -> dict[str, nn.Parameter]:
    """Return a model's parameters by name, in the order of the weight table; a layer's grouped experts are one parameter."""
    parameters = dict(policy.model.named_parameters())
    names = (row.megatron for row in policy.plan.codec.rows)
    return {own: parameters[own] for own in (n if n in parameters else EXPERT.sub("", n) for n in names)}


def _master(weight: nn.Parameter) -> nn.Parameter:
    """Return an fp32 parameter that receives a weight's gradients."""
    master = nn.Parameter(torch.empty_like(weight, dtype=torch.float32))
    weight.register_post_accumulate_grad_hook(partial(_pass_on, master))
    return master


def _pass_on(master: nn.Parameter, weight: Tensor) -> None:
    """Add a weight's gradient to its master's.

    It arrives rounded to the weight's dtype, once per row; docs/benchmarks.md, "Long rows", says why.
    """
    grad, weight.grad = weight.grad, None
    if grad is None:
        return
    if master.grad is None:
        master.grad = grad.float()
    else:
        master.grad.add_(grad)

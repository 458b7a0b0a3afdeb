"""What a run trains: an adapter beside frozen weights, or every weight. All that differs between the two is here.

Purpose: `open_model` reads a run's base model and says what of it is trained; the trainer then only speaks to a `Trained`.
Owner of: the fp32 masters of full parameters (an adapter's belong to `Lora`).
Invariants: names and layouts on disk are Hugging Face's or PEFT's, never Megatron's; checkpoint 0 of full parameters is the
base; what the engine is served is rounded once, from fp32 to its dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from artd_schema.spec import Parameters, RunSpec

from ..models.registry import plan_for, read_config
from . import checkpoint, placement
from .checkpoint import Staging
from .lora import Adapter, Lora, adapter_config, shapes_of
from .merge import BaseWeights, merged_tensors
from .model import ALONE, Policy, build, load_base
from .step import ParameterSet


class Trained(Protocol):
    """A run's trained parameters and their form in a checkpoint."""

    @property
    def kind(self) -> Parameters:
        """As the manifest says it."""
        ...

    @property
    def file(self) -> str:
        """Safetensors file of a checkpoint folder that `load` takes."""
        ...

    @property
    def parameters(self) -> ParameterSet:
        """What the optimizer works on."""
        ...

    def initialise(self, seed: int) -> None:
        """Set the parameters of step 0."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in what `stage` wrote. Raises ValueError when names, shapes or dtypes are not the model's."""
        ...

    def stage(self, staging: Staging) -> None:
        """Write the files of the parameters as they are now."""
        ...

    def served(self) -> Iterator[tuple[str, Tensor]]:
        """(name, new tensor) of what the engine is served, in push order."""
        ...


class AdapterState:
    """A LoRA adapter; the base stays as it is."""

    kind: Parameters = "lora"
    file = checkpoint.ADAPTER

    def __init__(self, policy: Policy, lora: Lora, base: BaseWeights, spec: RunSpec) -> None:
        self._policy, self._base, self._spec = policy, base, spec
        self.parameters = lora

    def initialise(self, seed: int) -> None:
        self.parameters.initialise(seed)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.parameters.load(tensors)

    def stage(self, staging: Staging) -> None:
        staging.tensors(checkpoint.ADAPTER, self._stored())
        rank, alpha = self.parameters.rank, self.parameters.alpha
        config = adapter_config(self._spec.model, self._policy.plan.codec, rank, alpha)
        staging.json(checkpoint.ADAPTER_CONFIG, config)

    def _stored(self) -> Adapter:
        """The adapter on the CPU, copied there in few pieces; on a CPU the live one."""
        return self.parameters.outward({name: one.detach().cpu() for name, one in self.parameters.named()})

    def served(self) -> Iterator[tuple[str, Tensor]]:
        if self._spec.rollout_weights_mode == "lora":
            return ((name, tensor.clone()) for name, tensor in sorted(self._stored().items()))
        dtype = getattr(torch, self._spec.engine.dtype)
        # The merge is elementwise: a GPU gives the same bits.
        merged = merged_tensors(self._base, self.parameters.state(), self.parameters.scale, dtype)
        return ((name, tensor.cpu()) for name, tensor in merged)


class FullState:
    """Every weight of the model, trained in place in fp32. Also its own `ParameterSet`, in Megatron's layout."""

    kind: Parameters = "full"
    file = checkpoint.MODEL

    def __init__(self, policy: Policy, base: BaseWeights, spec: RunSpec) -> None:
        """policy: without adapter; its weights require gradients from now on. Raises ValueError for a mode without them."""
        if spec.rollout_weights_mode != "merged":
            raise ValueError("parameters='full' has no adapter to serve: use rollout_weights_mode='merged'")
        self._model, self._plan, self._base, self._spec = policy.model, policy.plan, base, spec
        self._parameters = dict(policy.model.named_parameters())
        policy.model.requires_grad_(True)

    @property
    def parameters(self) -> ParameterSet:
        return self

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((row.megatron, self._parameters[row.megatron]) for row in self._plan.codec.rows)

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = dict(self._plan.codec.to_hf(own))
        return {name: found[name] for name in self._base}

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(self._plan.codec.to_megatron(stored))

    def initialise(self, seed: int) -> None:
        load_base(self._model, self._plan, self._base)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        if odd := [name for name, tensor in tensors.items() if tensor.dtype != torch.float32]:
            raise ValueError(f"{odd[0]} is {tensors[odd[0]].dtype}, and full parameters are kept in fp32")
        load_base(self._model, self._plan, tensors)

    def state(self) -> dict[str, Tensor]:
        """The live weights without gradient in Hugging Face names, in the base's order; not all are copies."""
        return self.outward({name: parameter.detach() for name, parameter in self.named()})

    def stage(self, staging: Staging) -> None:
        staging.tensors(checkpoint.MODEL, self.state())

    def served(self) -> Iterator[tuple[str, Tensor]]:
        return merged_tensors(self.state(), {}, 1.0, getattr(torch, self._spec.engine.dtype))


def open_model(spec: RunSpec) -> tuple[Policy, Trained]:
    """Build a run's model with what it trains. Raises ValueError (UnsupportedModel, an incomplete checkpoint)."""
    plan, base = plan_for(read_config(spec.model)), BaseWeights(spec.model)
    where = placement.of(spec, plan.layers)
    if spec.parameters == "full":
        policy = Policy(plan, build(plan, base), None)
        return policy, FullState(policy, base, spec)
    lora = Lora(plan.codec, shapes_of(plan.codec, base), spec.lora.rank, spec.lora.alpha, where.grouped)
    policy = Policy(plan, build(plan, base, ALONE, where), lora)
    return policy, AdapterState(policy, lora, base, spec)

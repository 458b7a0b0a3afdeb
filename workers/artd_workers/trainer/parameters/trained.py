"""What a run trains: an adapter beside frozen weights, or every weight. All that differs between the two is here.

`open_model` reads a run's base model and says what of it is trained; the trainer then uses only the `Trained`. `Lora` and
`FullState` (`ShardedState`) own the masters. Names and layouts on disk are Hugging Face's or PEFT's, never Megatron's.
Checkpoint 0 of full parameters is the base. Served weights are rounded once, from fp32 to the engine's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Protocol

import torch
from msgspec import UNSET
from torch import Tensor

from artd_schema.data.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILE, WeightEntry
from artd_schema.run.spec import Parameters, RunSpec
from artd_workers.models.registry import plan_for, read_config
from artd_workers.trainer import placement
from artd_workers.trainer.checkpoint import held
from artd_workers.trainer.checkpoint.folder import Staging
from artd_workers.trainer.model.lora import Adapter, Lora, adapter_config, shapes_of
from artd_workers.trainer.model.model import Policy, build
from artd_workers.trainer.parallel.layout import ALONE, Parallel
from artd_workers.transfer.merge import merged_tensors, open_base

from .contract import ParameterSet
from .full import FullState
from .full_sharded import ShardedState
from .lora_sharded import lora_of


class Trained(Protocol):
    """A run's trained parameters and their form in a checkpoint."""

    @property
    def base(self) -> Mapping[str, Tensor]:
        """The base model's tensors by Hugging Face name, in push order."""
        ...

    @property
    def kind(self) -> Parameters:
        """The manifest's `parameters`: `lora` or `full`."""
        ...

    @property
    def file(self) -> str:
        """The safetensors file of a checkpoint folder that `load` reads."""
        ...

    @property
    def parameters(self) -> ParameterSet:
        """The parameters that the optimizer works on."""
        ...

    def initialise(self, seed: int) -> None:
        """Set the parameters of step 0."""
        ...

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy in what `stage` wrote. Raises ValueError when names, shapes or dtypes are not the model's."""
        ...

    def collect(self) -> None:
        """Gather other ranks' shards for `stage` and `served_tensors`. Collective: every rank calls it."""
        ...

    def release(self) -> None:
        """Free what `collect` gathered."""
        ...

    def stage(self, staging: Staging) -> None:
        """Write the files of the present parameters."""
        ...

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, new tensor) of what the engine is served, in push order."""
        ...

    def held_entries(self) -> tuple[WeightEntry, ...]:
        """Return table entries of what an engine must hold of the adapter; empty where it is served merged weights."""
        ...


class AdapterState:
    """A LoRA adapter; the base weights stay frozen."""

    kind: Parameters = "lora"
    file = ADAPTER_FILE

    def __init__(self, policy: Policy, lora: Lora, base: Mapping[str, Tensor], spec: RunSpec) -> None:
        self._policy, self.base, self._spec = policy, base, spec
        self.parameters = lora
        self._collected: Adapter | None = None

    def initialise(self, seed: int) -> None:
        self.parameters.initialise(seed)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.parameters.load(tensors)

    def collect(self) -> None:
        self._collected = self.parameters.state() if self._policy.parallel.world > 1 else None

    def release(self) -> None:
        self._collected = None

    def stage(self, staging: Staging) -> None:
        staging.tensors(ADAPTER_FILE, self._whole())
        rank, alpha = self.parameters.rank, self.parameters.alpha
        config = adapter_config(self._spec.model, self._policy.plan.codec, rank, alpha)
        staging.json(ADAPTER_CONFIG_FILE, config)

    def _whole(self) -> Adapter:
        """Return the adapter on its device: the live one, or what `collect` gathered."""
        return self.parameters.state() if self._collected is None else self._collected

    def _copy_to_cpu(self) -> Adapter:
        """Return the adapter on the CPU, copied in few pieces; on a CPU it is the live one."""
        if self._collected is not None:
            return {name: tensor.cpu() for name, tensor in self._collected.items()}
        return self.parameters.outward({name: one.detach().cpu() for name, one in self.parameters.list_parameters()})

    def held_entries(self) -> tuple[WeightEntry, ...]:
        if self._spec.rollout_weights_mode != "lora":
            return ()
        return held.entries(self._whole(), self.parameters.scale, getattr(torch, self._spec.engine.dtype))

    def served_tensors(self) -> Iterator[tuple[str, Tensor]]:
        if self._spec.rollout_weights_mode == "lora":
            return ((name, tensor.clone()) for name, tensor in sorted(self._copy_to_cpu().items()))
        dtype = getattr(torch, self._spec.engine.dtype)
        # The merge is elementwise, so a GPU gives the same bits.
        merged = merged_tensors(self.base, self._whole(), self.parameters.scale, dtype)
        return ((name, tensor.cpu()) for name, tensor in merged)


def open_model(spec: RunSpec, parallel: Parallel = ALONE) -> tuple[Policy, Trained]:
    """Build a run's model, or this rank's part of it, with what it trains. Raises ValueError (UnsupportedModel, an incomplete
    checkpoint)."""
    plan = plan_for(read_config(spec.model))
    parallel.check(plan)
    where = placement.of(spec, plan.layers)
    base = open_base(spec.model, where.device)
    if spec.parameters == "full":
        policy = Policy(plan, build(plan, base, parallel, where), None, parallel)
        return policy, (FullState if parallel.world == 1 else ShardedState)(policy, base, spec)
    if spec.lora.targets is not UNSET:
        plan = replace(plan, codec=plan.codec.targeting(spec.lora.targets))
    rank, alpha = spec.lora.rank, spec.lora.stored_alpha
    lora = lora_of(plan, shapes_of(plan.codec, base), rank, alpha, where.grouped, parallel)
    policy = Policy(plan, build(plan, base, parallel, where), lora, parallel)
    return policy, AdapterState(policy, lora, base, spec)

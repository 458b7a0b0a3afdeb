"""The parallel layout of one model: its sizes, and the part of each weight that a rank holds.

`Parallel` names and cuts whole weights for this process, in Megatron's names and layout. The process groups are
Megatron's (`parallel_state`); `ranks` creates them before a model is built. Whatever the layout, a model is built
from the same whole weights. Ranks hold disjoint parts of a split weight and equal copies of every other weight.
Tensor-parallel ranks always use sequence parallelism: they share a row's tokens between their products. Ranks that
hold copies of the attention train different rows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from artd_schema.run.spec import RunSpec
from artd_schema.run.spec_rules import layout_error
from artd_workers.models.base import Plan, UnsupportedModel
from artd_workers.models.codec import Codec

_EXPERT = re.compile(r"(?<=\.local_experts\.)\d+(?=\.)")
_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+(?=\.)")
_COLUMN, _ROW = ("linear_qkv", "linear_fc1", "word_embeddings", "output_layer"), ("linear_proj", "linear_fc2")


@dataclass(frozen=True)
class Parallel:
    """The sizes of a layout.

    `tp` is the tensor-parallel size. `ep` is the expert-parallel size; if it is 1, experts are sharded like all other
    weights. `pp` is the number of pipeline stages, each with the same number of layers. `cp` is the context-parallel
    size: the ranks that share a row's tokens in every operation.
    """

    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1

    @classmethod
    def of(cls, spec: RunSpec) -> Parallel:
        """Return a run's layout. Raises ValueError when its sizes do not fit together."""
        if error := layout_error(spec):
            raise ValueError(error)
        asked = spec.trainer
        return cls(asked.tensor_parallel, asked.expert_parallel, asked.pipeline_parallel, asked.context_parallel)

    @property
    def sp(self) -> bool:
        """Whether tensor-parallel ranks share a row's tokens (sequence parallelism)."""
        return self.tp > 1

    @property
    def etp(self) -> int:
        """Tensor-parallel size of the experts."""
        return self.tp if self.ep == 1 else 1

    @property
    def ranks_per_row(self) -> int:
        """Number of ranks that share one row. Their numbers are consecutive."""
        return self.tp * self.cp

    @property
    def ranks_per_stage(self) -> int:
        """Number of ranks in one pipeline stage. Their numbers are consecutive."""
        return max(self.ranks_per_row, self.ep)

    @property
    def world(self) -> int:
        """Number of ranks in total."""
        return self.ranks_per_stage * self.pp

    @property
    def replicas(self) -> int:
        """Number of rows that each stage trains at a time."""
        return self.ranks_per_stage // self.ranks_per_row

    def settings(self) -> dict[str, Any]:
        """Return the layout's arguments of TransformerConfig. Raises ValueError when Megatron's process groups have
        other sizes.
        """
        groups = Parallel(
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_expert_model_parallel_world_size(),
            parallel_state.get_pipeline_model_parallel_world_size(),
        )
        if groups != replace(self, cp=1):  # Megatron's groups do not include context parallelism
            raise ValueError(f"the layout is {self}, but the process groups have {groups}")
        return {
            "tensor_model_parallel_size": self.tp,
            "expert_model_parallel_size": self.ep,
            "expert_tensor_parallel_size": self.etp,
            "pipeline_model_parallel_size": self.pp,
            "sequence_parallel": self.sp,
        }

    def check(self, plan: Plan) -> None:
        """Check that this layout can cut a model. Raises UnsupportedModel when it cannot."""
        experts, inner = (plan.transformer.get(name) or 0 for name in ("num_moe_experts", "moe_ffn_hidden_size"))
        if self.ep > 1 and not experts:
            raise UnsupportedModel(f"trainer.expert_parallel={self.ep}: the model has no experts, use 1")
        sizes = {
            ("expert_parallel", "experts"): (self.ep, experts),
            ("tensor_parallel", "query groups"): (self.tp, plan.codec.shape.groups),
            ("tensor_parallel", "words of the vocabulary"): (self.tp, plan.vocab_size),
            ("tensor_parallel", "channels of the MLP"): (self.tp, plan.transformer["ffn_hidden_size"]),
            ("tensor_parallel", "channels of an expert"): (self.etp, inner),
        }
        self._check_stages(plan)
        for (field, what), (size, count) in sizes.items():
            if count % size:
                raise UnsupportedModel(f"trainer.{field}={size} does not divide the model's {count} {what}")

    def _check_stages(self, plan: Plan) -> None:
        if self.pp == 1:
            return
        if plan.layers % self.pp:
            raise UnsupportedModel(
                f"trainer.pipeline_parallel={self.pp} does not divide the model's {plan.layers} layers"
            )
        if plan.model["share_embeddings_and_output_weights"]:
            raise UnsupportedModel(
                f"trainer.pipeline_parallel={self.pp}: the model's first and last stage would share a weight, use 1"
            )
        each, sparse = plan.layers // self.pp, sparse_of(plan)
        if plan.routes is not None and not all(any(sparse[at : at + each]) for at in range(0, plan.layers, each)):
            raise UnsupportedModel(f"trainer.pipeline_parallel={self.pp}: a stage would have no layer with experts")

    def layers(self, plan: Plan) -> range:
        """Return the layers of this rank's stage."""
        each = plan.layers // self.pp
        first = each * parallel_state.get_pipeline_model_parallel_rank() if self.pp > 1 else 0
        return range(first, first + each)

    def expert_layers(self, plan: Plan) -> slice:
        """Return which of the model's MoE layers are in this rank's stage, as indices among the MoE layers."""
        sparse, own = sparse_of(plan), self.layers(plan)
        return slice(sum(sparse[: own.start]), sum(sparse[: own.stop]))

    def own_name(self, name: str, plan: Plan) -> str | None:
        """Return this rank's name of a parameter of the whole model, or None when another rank holds it."""
        if self.pp > 1:
            layers = self.layers(plan)
            found = _LAYER.search(name)
            if found is None:
                here = layers.start == 0 if name.startswith("embedding.") else layers.stop == plan.layers
                return name if here else None
            if int(found[0]) not in layers:
                return None
            name = _LAYER.sub(str(int(found[0]) - layers.start), name)
        expert = _EXPERT.search(name)
        if expert is None or self.ep == 1:
            return name
        each = (plan.routes.experts if plan.routes is not None else 0) // self.ep
        index = int(expert[0]) - each * parallel_state.get_expert_model_parallel_rank()
        return _EXPERT.sub(str(index), name) if 0 <= index < each else None

    def whole_name(self, name: str, plan: Plan) -> str:
        """Return the whole model's name of one of this rank's modules. An expert's number is not translated, so the
        name must be that of all experts of a layer.
        """
        first = self.layers(plan).start
        return _LAYER.sub(lambda found: str(int(found[0]) + first), name)

    def codec(self, plan: Plan) -> Codec:
        """Return the weight table of this rank's part: this rank's Megatron names and heads, and the Hugging Face
        names of the whole model.
        """
        named = ((row, self.own_name(row.megatron, plan)) for row in plan.codec.rows)
        rows = tuple(replace(row, megatron=name) for row, name in named if name is not None)
        shape = plan.codec.shape
        return Codec(rows, replace(shape, heads=shape.heads // self.tp, groups=shape.groups // self.tp))

    def shapes(self, codec: Codec, whole: Mapping[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
        """Return (out, in) of this rank's part of every adapted weight. `codec` is the result of `codec()`; `whole`
        has the shapes of the whole weights.
        """
        found = {}
        for row in codec.lora_rows():
            dim, size = split_of(row.megatron), self.etp if _EXPERT.search(row.megatron) else self.tp
            for part in row.parts:
                out, into = whole[part]
                found[part] = (out // size, into) if dim == 0 else (out, into // size)
        return found


ALONE = Parallel()


def sparse_of(plan: Plan) -> list[int]:
    """Return one number per layer: 1 if the layer has experts, else 0."""
    return [int(layer.sparse) for layer in plan.decoder]


def split_of(name: str) -> int | None:
    """Return the dimension along which tensor-parallel ranks split a Megatron weight, or None when each has a copy."""
    linear = name.removesuffix(".weight").rpartition(".")[2]
    return 0 if linear in _COLUMN else 1 if linear in _ROW else None


def part(name: str, whole: Tensor) -> Tensor:
    """Return this rank's part of a whole weight in Megatron's layout."""
    if _EXPERT.search(name):
        size, rank = (
            parallel_state.get_expert_tensor_parallel_world_size(),
            parallel_state.get_expert_tensor_parallel_rank(),
        )
    else:
        size, rank = (
            parallel_state.get_tensor_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_rank(),
        )
    dim = split_of(name)
    if size == 1 or dim is None:
        return whole
    # A fused gate and up holds two weights, one above the other; each is split by itself.
    blocks = whole.chunk(2 if ".linear_fc1." in name else 1, dim)
    return torch.cat([block.chunk(size, dim)[rank] for block in blocks], dim)

"""LoRA on every linear, as plain PEFT modules although Megatron fuses q, k, v and gate, up.

Purpose: each Hugging Face linear has its own A [r, in] and B [out, r]; a fused Megatron linear adds its parts' products in
Megatron's layout, by the codec table. Owner of: the adapter's fp32 master parameters.
Invariants: parameters iterate in table order (the order of optimizer state on disk); A depends on (seed, name) alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from ..models.codec import Codec, Row, peft_names

Adapter = dict[str, Tensor]
"""Adapter tensors in PEFT names, fp32."""


class FusedAdapter(nn.Module):
    """The adapters of the parts of one Megatron linear. forward: x [..., in] -> addition [..., out] in its layout."""

    def __init__(
        self, codec: Codec, row: Row, sizes: tuple[int, ...], in_features: int, rank: int, scale: float
    ) -> None:
        super().__init__()
        self._codec, self.row, self._scale = codec, row, scale
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, in_features)) for _ in sizes)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(size, rank)) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        parts = [(x @ a.t()) @ b.t() for a, b in zip(self.a, self.b, strict=True)]
        return self._codec.fuse(self.row, parts, -1) * self._scale


class LoraColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear that adds an adapter's product, once one is attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: FusedAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        return (out if self.adapter is None else out + self.adapter(input_)), bias


class LoraRowLinear(RowParallelLinear):
    """Megatron's row-parallel linear that adds an adapter's product, once one is attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: FusedAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        return (out if self.adapter is None else out + self.adapter(input_)), bias


class Lora:
    """All adapters of a model. scale: alpha / rank."""

    def __init__(self, codec: Codec, shapes: Mapping[str, tuple[int, int]], rank: int, alpha: int) -> None:
        """shapes: Hugging Face weight name -> (out, in) of every adapted weight."""
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        self._fused: dict[str, FusedAdapter] = {}
        for row in codec.lora_rows():
            sizes = tuple(shapes[part][0] for part in row.parts)
            adapter = FusedAdapter(codec, row, sizes, shapes[row.parts[0]][1], rank, self.scale)
            self._fused[row.megatron.removesuffix(".weight")] = adapter

    def attach(self, model: GPTModel) -> None:
        """Hang the adapters into their linears."""
        for path, adapter in self._fused.items():
            model.get_submodule(path).adapter = adapter

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(PEFT name, parameter): A then B of each weight, in table order."""
        for adapter in self._fused.values():
            for part, a, b in zip(adapter.row.parts, adapter.a, adapter.b, strict=True):
                name_a, name_b = peft_names(part)
                yield name_a, a
                yield name_b, b

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named()]

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors by PEFT name, which is what is on disk."""
        return dict(own)

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same; raises ValueError when the names are not exactly this adapter's."""
        self._check_names(stored)
        return dict(stored)

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """A: kaiming-uniform with a = sqrt(5), which is U(-1/sqrt(in), 1/sqrt(in)), as PEFT; B: zero."""
        for name, parameter in self.named():
            if ".lora_B." in name:
                parameter.zero_()
                continue
            word = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(word, "little") >> 1)
            bound = 1 / math.sqrt(parameter.shape[1])
            parameter.uniform_(-bound, bound, generator=generator)

    def state(self) -> Adapter:
        """The live parameters without gradient (not copies), in table order."""
        return {name: parameter.detach() for name, parameter in self.named()}

    @torch.no_grad()
    def load(self, adapter: Mapping[str, Tensor]) -> None:
        """Copy tensors in PEFT names in. Raises ValueError when names, shapes or dtypes differ."""
        self._check_names(adapter)
        for name, parameter in self.named():
            if adapter[name].shape != parameter.shape or adapter[name].dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tuple(adapter[name].shape)} {adapter[name].dtype}, not {tuple(parameter.shape)} fp32"
                )
            parameter.copy_(adapter[name])

    def _check_names(self, tensors: Mapping[str, Tensor]) -> None:
        if odd := sorted({name for name, _ in self.named()} ^ set(tensors)):
            raise ValueError(f"the adapter and this model differ in {len(odd)} tensors, the first is {odd[0]}")


def shapes_of(codec: Codec, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """(out, in) of every adapted weight."""
    return {part: (weights[part].shape[0], weights[part].shape[1]) for row in codec.lora_rows() for part in row.parts}


def adapter_config(base: str, codec: Codec, rank: int, alpha: int) -> dict[str, Any]:
    """`adapter_config.json` for PEFT and vLLM."""
    targets = sorted(
        {part.removesuffix(".weight").rsplit(".", 1)[1] for row in codec.lora_rows() for part in row.parts}
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "use_rslora": False,
        "use_dora": False,
        "target_modules": targets,
        "modules_to_save": None,
    }

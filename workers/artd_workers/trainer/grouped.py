"""The experts of a layer as one parameter, multiplied in one grouped product, with an adapter for each of them.

Purpose: `GroupedExperts` stands in for Megatron's SequentialMLP where a loop over experts would be too slow;
`GroupedAdapter` is `lora.FusedAdapter` for all experts of a layer at once; `slots` gives a model's weights under the
codec's names, expert by expert. Owner of: the experts' weights [experts, out, in] and the adapters' fp32 masters.
Invariants: plain torch (any device); names and layouts outside this file are the codec's; no wait for the device.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from ..models.codec import Row, peft_names

EXPERT = re.compile(r"\.local_experts\.\d+(?=\.)")
ALIGNED = 8
"""Numbers: grouped products of bf16 want rows of 16 bytes, so a small rank gets zeros beside it."""


class GroupedLinear(nn.Module):
    """x [T, in], whose rows lie expert by expert -> [T, out]; rows of expert e end at ends[e] (int32 [experts])."""

    def __init__(self, experts: int, in_features: int, out_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, out_features, in_features, dtype=dtype))
        self.adapter: GroupedAdapter | None = None

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        out = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends)
        return out if self.adapter is None else out.add_(self.adapter(x, ends))


class GroupedExperts(MegatronModule):
    """All experts of one layer on this rank: Megatron's builder of experts calls it."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: Any) -> None:
        super().__init__(config=config)
        hidden, inner = config.hidden_size, config.moe_ffn_hidden_size or config.ffn_hidden_size
        self.linear_fc1 = GroupedLinear(num_local_experts, hidden, 2 * inner, config.params_dtype)
        self.linear_fc2 = GroupedLinear(num_local_experts, inner, hidden, config.params_dtype)

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        """tokens [T, hidden] sorted by expert, their numbers [experts] (any device), probs [T] -> [T, hidden], no bias."""
        ends = tokens_per_expert.to(tokens.device, non_blocking=True).cumsum(0).to(torch.int32)
        inner = self._activate(self.linear_fc1(tokens, ends), probs[:, None])
        return self.linear_fc2(inner, ends), None

    def _activate(self, both: Tensor, probs: Tensor) -> Tensor:
        if self.config.bias_activation_fusion:
            return weighted_bias_swiglu_impl(both, None, probs)
        gate, up = both.chunk(2, -1)
        return (F.silu(gate) * up * probs).to(both.dtype)


class GroupedAdapter(nn.Module):
    """Adapters of one linear of every expert. a: fp32 [experts, parts, r, in]; b: fp32 [experts, parts, out of a part, r].

    A fused gate and up has two parts, one above the other in its output.
    """

    def __init__(
        self, path: str, rows: Sequence[Row], sizes: tuple[int, ...], in_features: int, rank: int, scale: float
    ) -> None:
        """path: of the linear in the model; rows: of its experts, in order; sizes: out of each part, all equal."""
        super().__init__()
        experts, parts = len(rows), len(sizes)
        if len(set(sizes)) > 1 or any(row.layout not in ("plain", "concat") for row in rows):
            raise ValueError(f"{path}: experts whose parts have the sizes {sizes} cannot share one adapter parameter")
        self._path, self._rows = path, tuple(rows)
        self.a = nn.Parameter(torch.empty(experts, parts, rank, in_features))
        self.b = nn.Parameter(torch.zeros(experts, parts, sizes[0], rank))
        self.register_buffer("_apart", scale * torch.eye(parts)[:, None, :, None], persistent=False)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        """x [T, in] -> addition [T, out], scaled."""
        a = self.a.flatten(1, 2)
        # Block-diagonal over the parts: one product instead of one for each part and a copy that joins them.
        b = (self.b[:, :, :, None, :] * self._apart).flatten(3, 4).flatten(1, 2)
        if extra := -a.shape[1] % ALIGNED:
            a, b = F.pad(a, (0, 0, 0, extra)), F.pad(b, (0, extra))
        a, b = a.to(x.dtype), b.to(x.dtype)
        return F.grouped_mm(F.grouped_mm(x, a.transpose(1, 2), offs=ends), b.transpose(1, 2), offs=ends)

    def named(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(own name, parameter)."""
        yield f"{self._path}.lora_A", self.a
        yield f"{self._path}.lora_B", self.b

    def slots(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """(PEFT name, its part of the own tensor), expert by expert; `own` by own name, of the parameters' shapes."""
        a, b = (own[name] for name, _ in self.named())
        for expert, row in enumerate(self._rows):
            for index, part in enumerate(row.parts):
                name_a, name_b = peft_names(part)
                yield name_a, a[expert, index]
                yield name_b, b[expert, index]


def slots(model: nn.Module) -> dict[str, Tensor]:
    """A model's parameters by the codec's names; an expert's weight is its part of the layer's parameter."""
    out: dict[str, Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, GroupedLinear):
            weight, (experts, linear) = out.pop(f"{path}.weight"), path.rsplit(".", 1)
            out |= {f"{experts}.local_experts.{i}.{linear}.weight": one for i, one in enumerate(weight)}
    return out

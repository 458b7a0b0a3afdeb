"""Translates weights between Hugging Face, Megatron and PEFT by one table.

Import, export, LoRA names and the merged export read the same rows, so they cannot disagree. Every conversion permutes
elements, so it is exact. A name that the table or the checkpoint lacks is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["plain", "concat", "query_groups"]

PEFT_PREFIX = "base_model.model."
PEFT_A, PEFT_B = ".lora_A.weight", ".lora_B.weight"
"""How PEFT names the tensors of an adapter: prefix, module, suffix."""


@dataclass(frozen=True)
class Row:
    """One Megatron parameter and the Hugging Face tensors that it holds; `{i}` stands for the layer, `{e}` for the expert.

    `layout`: plain = one tensor; concat = one after the other along the output; query_groups = for each query group the q of
    its heads, then its k, then its v. `lora`: each part gets an adapter of its own.
    """

    megatron: str
    parts: tuple[str, ...]
    layout: Layout = "plain"
    lora: bool = False

    def at(self, layer: int) -> Row:
        """Return the row of one layer."""
        return self._with("{i}", layer)

    def of(self, expert: int) -> Row:
        """Return the row of one expert."""
        return self._with("{e}", expert)

    def _with(self, mark: str, number: int) -> Row:
        parts = tuple(part.replace(mark, str(number)) for part in self.parts)
        return replace(self, megatron=self.megatron.replace(mark, str(number)), parts=parts)


@dataclass(frozen=True)
class Heads:
    """The numbers of attention heads and of query groups (= key/value heads), and the size of a head."""

    heads: int
    groups: int
    head_dim: int


@dataclass(frozen=True)
class Codec:
    """The rows of one model, expanded over its layers."""

    rows: tuple[Row, ...]
    shape: Heads

    @classmethod
    def expand(cls, per_model: Sequence[Row], layers: Sequence[Sequence[Row]], shape: Heads) -> Codec:
        """Make the table of a model. `per_model`: rows outside the layers; `layers`: the rows of each layer."""
        return cls((*per_model, *(row.at(i) for i, rows in enumerate(layers) for row in rows)), shape)

    def fuse(self, row: Row, parts: Sequence[Tensor], dim: int = 0) -> Tensor:
        """Join a row's parts, in its order, along their output dimension `dim` into Megatron's layout."""
        if row.layout == "plain":
            return parts[0]
        if row.layout == "concat":
            return torch.cat(list(parts), dim)
        s, dim = self.shape, dim % parts[0].ndim
        blocks = [part.unflatten(dim, (s.groups, -1, s.head_dim)) for part in parts]
        return torch.cat(blocks, dim + 1).flatten(dim, dim + 2)

    def split(self, row: Row, tensor: Tensor, dim: int = 0) -> list[Tensor]:
        """Undo `fuse`. Returns a row's parts, contiguous."""
        if row.layout == "plain":
            return [tensor]
        if row.layout == "concat":
            return [part.contiguous() for part in tensor.chunk(len(row.parts), dim)]
        s, dim = self.shape, dim % tensor.ndim
        blocks = tensor.unflatten(dim, (s.groups, -1, s.head_dim)).split([s.heads // s.groups, 1, 1], dim + 1)
        return [block.flatten(dim, dim + 2).contiguous() for block in blocks]

    def to_megatron(
        self, weights: Mapping[str, Tensor], rows: Sequence[Row] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (Megatron name, tensor) of `rows`, None = all. Raises ValueError unless the names are exactly the table's."""
        known = {part for row in self.rows for part in row.parts}
        if missing := sorted(known - set(weights)):
            raise ValueError(f"the checkpoint lacks {missing[0]} (and {len(missing) - 1} more): it is not complete")
        if extra := sorted(set(weights) - known):
            raise ValueError(
                f"the checkpoint has {extra[0]} (and {len(extra) - 1} more), which its family does not define"
            )
        for row in self.rows if rows is None else rows:
            yield row.megatron, self.fuse(row, [weights[part] for part in row.parts])

    def to_hf(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, tensor) from Megatron's state; entries that the table lacks are ignored."""
        for row in self.rows:
            yield from zip(row.parts, self.split(row, state[row.megatron]), strict=True)

    def targeting(self, modules: Collection[str]) -> Codec:
        """Return this table with adapters on the linears of these names alone, such as `q_proj`. Raises ValueError if the model adapts no
        linear of one of the names, or if one Megatron linear holds others beside it."""
        names = {row: {module_name(part).rpartition(".")[2] for part in row.parts} for row in self.lora_rows()}
        if odd := sorted(set(modules) - {name for own in names.values() for name in own}):
            raise ValueError(f"lora.targets: this model has no linear {odd[0]!r} that could be adapted: leave it out")
        if cut := [sorted(own) for own in names.values() if own & set(modules) and not own <= set(modules)]:
            raise ValueError(f"lora.targets: {', '.join(cut[0])} are adapted together: name all of them, or none")
        rows = (replace(row, lora=row.lora and names[row] <= set(modules)) for row in self.rows)
        return replace(self, rows=tuple(rows))

    def lora_rows(self) -> Iterator[Row]:
        """Yield the rows whose parts are adapted, in table order."""
        return (row for row in self.rows if row.lora)


def module_name(weight: str) -> str:
    """Return the module that owns a weight: `model.layers.0.mlp.up_proj.weight` gives `model.layers.0.mlp.up_proj`."""
    return weight.removesuffix(".weight")


def peft_names(weight: str) -> tuple[str, str]:
    """Return PEFT's names of the tensors A [r, in] and B [out, r] that adapt a Hugging Face weight."""
    stem = PEFT_PREFIX + module_name(weight)
    return stem + PEFT_A, stem + PEFT_B

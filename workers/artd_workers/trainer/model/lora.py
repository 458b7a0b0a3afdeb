"""LoRA on every linear, as plain PEFT modules, although Megatron fuses q, k, v and gate, up.

Each Hugging Face linear has its own A [r, in] and B [out, r]. A fused Megatron linear adds the products of its parts in
Megatron's layout, by the codec's table. This file owns the adapter's fp32 masters. Parameters iterate in table order, the order
of the optimizer's state on disk. Files on disk have PEFT's names and shapes, however the parameters are stored. A depends on
(seed, name) alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from torch import Tensor, nn

from artd_workers.models.codec import PEFT_B, Codec, Row, peft_names
from artd_workers.trainer.model.experts.grouped import EXPERT, GroupedAdapter

from .cached import Cached
from .gradients import gradient_norm

Adapter = dict[str, Tensor]
"""An adapter's tensors by PEFT name, fp32."""


class FusedAdapter(nn.Module):
    """The adapters of the parts of one Megatron linear. `forward`: x [..., in] -> what to add [..., out], in Megatron's layout."""

    def __init__(
        self, codec: Codec, row: Row, sizes: tuple[int, ...], in_features: int, rank: int, scale: float
    ) -> None:
        super().__init__()
        self._codec, self.row, self.scale = codec, row, scale
        self.a = nn.ParameterList(nn.Parameter(torch.empty(rank, in_features)) for _ in sizes)
        self.b = nn.ParameterList(nn.Parameter(torch.zeros(size, rank)) for size in sizes)
        self._joined = Cached(self.compute_join)

    def forward(self, x: Tensor) -> Tensor:
        parts = [(x @ a.to(x.dtype).t()) @ b.to(x.dtype).t() for a, b in zip(self.a, self.b, strict=True)]
        return self._codec.fuse(self.row, parts, -1) * self.scale

    def join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the adapters of all parts as one: A [parts * r, in], scaled, and B [out, parts * r] in Megatron's layout. It
        is cached."""
        return self._joined.of((*self.a, *self.b), dtype)

    def compute_join(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Compute what `join` returns, without keeping it."""
        rank, count = self.a[0].shape[0], len(self.a)
        apart = [F.pad(b, (i * rank, (count - 1 - i) * rank)) for i, b in enumerate(self.b)]
        return (self.scale * torch.cat(list(self.a))).to(dtype), self._codec.fuse(self.row, apart).to(dtype)

    def gradients(self, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of each A, then of each B, fp32, from those of what `join` returned."""
        rank = self.a[0].shape[0]
        parts = self._codec.split(self.row, b.float())
        d_b = [part[:, i * rank : (i + 1) * rank] for i, part in enumerate(parts)]
        return (*a.float().mul_(self.scale).split(rank), *d_b)

    def list_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (PEFT name, parameter): A, then B of each part."""
        for part, a, b in zip(self.row.parts, self.a, self.b, strict=True):
            name_a, name_b = peft_names(part)
            yield name_a, a
            yield name_b, b

    def slots(self, own: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield (PEFT name, tensor) of tensors by own name, which is the same here."""
        return ((name, own[name]) for name, _ in self.list_parameters())


class Adapted(nn.Module):
    """A mixin for a linear's class: adds an adapter's product to the output, once an adapter is attached."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adapter: FusedAdapter | None = None

    def forward(self, input_: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        out, bias = super().forward(input_, *args, **kwargs)
        return self.add_adapter(out, input_), bias

    def add_adapter(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapter's product of x [..., in] to the linear's output [..., out]."""
        return out if self.adapter is None else out + self.adapter(x)


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Let the model compute without its adapter inside the block."""
    held = {module: module.adapter for module in model.modules() if getattr(module, "adapter", None) is not None}
    try:
        for module in held:
            module.adapter = None  # type: ignore[assignment]
        yield
    finally:
        for module, adapter in held.items():
            module.adapter = adapter


class LoraColumnLinear(Adapted, ColumnParallelLinear):
    """Megatron's column-parallel linear with an adapter, once one is attached."""


class LoraRowLinear(Adapted, RowParallelLinear):
    """Megatron's row-parallel linear with an adapter, once one is attached."""


class Lora:
    """All adapters of a model. `scale`: alpha / rank."""

    views = True

    def __init__(
        self, codec: Codec, shapes: Mapping[str, tuple[int, int]], rank: int, alpha: float, grouped: bool = False
    ) -> None:
        """Make the adapters. `shapes`: Hugging Face weight name -> (out, in) of every adapted weight; `grouped`: a layer's
        experts are one parameter."""
        self.rank, self.alpha, self.scale = rank, alpha, alpha / rank
        rows: dict[str, list[Row]] = {}
        for row in codec.lora_rows():
            path = row.megatron.removesuffix(".weight")
            rows.setdefault(EXPERT.sub("", path) if grouped else path, []).append(row)
        self._adapters: dict[str, FusedAdapter | GroupedAdapter] = {}
        for path, here in rows.items():
            sizes, size_in = tuple(shapes[part][0] for part in here[0].parts), shapes[here[0].parts[0]][1]
            if grouped and EXPERT.search(here[0].megatron):
                self._adapters[path] = GroupedAdapter(path, here, sizes, size_in, rank, self.scale)
            else:
                self._adapters[path] = FusedAdapter(codec, here[0], sizes, size_in, rank, self.scale)
        self._names = tuple(name for row in codec.lora_rows() for part in row.parts for name in peft_names(part))

    def attach(self, model: GPTModel) -> None:
        """Attach the adapters to their linears, on the model's device."""
        device = next(model.parameters()).device
        for path, adapter in self._adapters.items():
            model.get_submodule(path).adapter = adapter.to(device)

    def list_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (own name, parameter), in table order. Own names are PEFT's, except for grouped experts."""
        for adapter in self._adapters.values():
            yield from adapter.list_parameters()

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.list_parameters()]

    def gradient_norm(self) -> float:
        """Return the global 2-norm of the gradients."""
        return gradient_norm(self.parameters())

    def sizes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor on disk by PEFT name, in table order."""
        return {name: slot.shape for name, slot in self.outward(dict(self.list_parameters())).items()}

    def outward(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by PEFT name, as on disk, in table order; they are views of the given ones."""
        found = {name: tensor for adapter in self._adapters.values() for name, tensor in adapter.slots(own)}
        return {name: found[name] for name in self._names}

    def inward(self, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors by own name, on the CPU. Raises ValueError when the names are not exactly this adapter's."""
        self._check_names(stored, self._names)
        own = {name: torch.empty(parameter.shape, dtype=parameter.dtype) for name, parameter in self.list_parameters()}
        for name, slot in self.outward(own).items():
            slot.copy_(stored[name])
        return own

    def refresh_weights(self) -> None:
        # torch's fused optimizer kernels do not count their writes, so `Cached` would keep the old values.
        torch.autograd.graph.increment_version(self.parameters())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Set A as PEFT does, kaiming-uniform with a = sqrt(5), which is U(-1/sqrt(in), 1/sqrt(in)), and B to zero."""
        start = {name: torch.zeros(size) for name, size in self.sizes().items()}
        for name, slot in start.items():
            if name.endswith(PEFT_B):
                continue
            word = hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8]
            generator = torch.Generator().manual_seed(int.from_bytes(word, "little") >> 1)
            bound = 1 / math.sqrt(slot.shape[1])
            slot.uniform_(-bound, bound, generator=generator)
        self.load(start)

    def state(self) -> Adapter:
        """Return the live parameters without gradient, not copies, by PEFT name in table order."""
        return self.outward({name: parameter.detach() for name, parameter in self.list_parameters()})

    @torch.no_grad()
    def load(self, adapter: Mapping[str, Tensor]) -> None:
        """Copy in tensors with PEFT names. Raises ValueError when names, shapes or dtypes differ."""
        sizes = self.sizes()
        self._check_names(adapter, sizes)
        for name, size in sizes.items():
            if adapter[name].shape != size or adapter[name].dtype != torch.float32:
                raise ValueError(
                    f"{name} is {tuple(adapter[name].shape)} {adapter[name].dtype}, not {tuple(size)} fp32"
                )
        # Whole parameters, because each copy to a GPU has a cost.
        own = self.inward(adapter)
        for name, parameter in self.list_parameters():
            parameter.copy_(own[name])

    def _check_names(self, tensors: Mapping[str, Tensor], names: Iterable[str]) -> None:
        if odd := sorted(set(names) ^ set(tensors)):
            raise ValueError(f"the adapter and this model differ in {len(odd)} tensors, the first is {odd[0]}")


def shapes_of(codec: Codec, weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every adapted weight."""
    return {part: (weights[part].shape[0], weights[part].shape[1]) for row in codec.lora_rows() for part in row.parts}


def adapter_config(base: str, codec: Codec, rank: int, alpha: float) -> dict[str, Any]:
    """Return `adapter_config.json` for PEFT and the engine.

    With transformers 5, PEFT takes gate, up and down for the fused experts' weights, and leaves them out of dense layers
    between sparse ones (seen in 0.21). There the weights themselves are named (`target_parameters`), which PEFT adapts in the
    same way.
    """
    parts = [part for row in codec.lora_rows() for part in row.parts]
    targets = sorted({part.removesuffix(".weight").rsplit(".", 1)[1] for part in parts})
    between = [part.removeprefix("model.") for part in parts if ".mlp." in part and ".experts." not in part]
    named = {"target_parameters": between} if between and any(".experts." in part for part in parts) else {}
    return named | {
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

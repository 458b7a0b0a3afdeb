"""The LoRA merge W + (alpha / rank) B A, defined once for push, export and engine start.

A merged weight has the same bits wherever it is made: in the trainer's interpreter, in the engine's, in an export.
The module needs only torch, safetensors and `artd_workers.models`, because the engine's interpreter imports it too.
It never changes the base. It uses no BLAS and no fused multiply-add, so the bits do not depend on threads, CPU or
torch build.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from artd_schema.run.families import SEEDED
from artd_workers.models import seeded
from artd_workers.models.codec import PEFT_A, PEFT_B, PEFT_PREFIX
from artd_workers.models.experts import Slice, parts

_HEAD = "lm_head.weight"
_CHUNK = 1 << 16
"""Elements merged at a time: two fp32 buffers of this size fit a core's L2 cache, and there are still few calls into
torch.
"""


@dataclass(frozen=True)
class _Place:
    """Where a tensor is stored: its file, its name there, and its slice of that tensor when experts are stored
    together.
    """

    path: Path
    stored: str
    part: Slice | None = None


def open_base(folder: str | Path, device: str = "cpu") -> BaseWeights | seeded.SeededWeights:
    """Open a base model's tensors by Hugging Face name, one by one on a device: seeded (`models.seeded`) or read
    (`BaseWeights`). Raises ValueError for a folder that is neither.
    """
    path = Path(folder)
    if (path / SEEDED).is_file() and any(path.glob("*.safetensors")):
        raise ValueError(f"{path} holds both {SEEDED} and weights: remove the one that is not this model's")
    return seeded.SeededWeights(path, device) if (path / SEEDED).is_file() else BaseWeights(path, device)


class BaseWeights(Mapping[str, Tensor]):
    """The tensors of a Hugging Face checkpoint folder, read on demand, in push order and under per-expert names.

    Order: safetensors files sorted by name, and names sorted within a file. `lm_head.weight` is left out when the
    config ties it to the embedding; stored rotary tables are left out because the config determines them. Raises
    ValueError for a folder that is not a safetensors checkpoint, or that holds a tensor twice.
    """

    def __init__(self, folder: str | Path, device: str = "cpu") -> None:
        self.folder, self._device = Path(folder), device
        config = self.folder / "config.json"
        if not config.is_file():
            raise ValueError(f"{self.folder} has no config.json: give a Hugging Face checkpoint folder")
        tied = bool(json.loads(config.read_text()).get("tie_word_embeddings", False))
        self._files = {path: safe_open(path, framework="pt") for path in weight_files(self.folder)}
        self._where: dict[str, _Place] = {}
        for path, handle in self._files.items():
            for name, place in sorted(_places(path, handle), key=lambda item: item[0]):
                if name.endswith("rotary_emb.inv_freq") or (tied and name == _HEAD):
                    continue
                if name in self._where:
                    raise ValueError(f"tensor {name} is both in {self._where[name].path.name} and in {path.name}")
                self._where[name] = place

    def __getitem__(self, name: str) -> Tensor:
        place = self._where[name]
        handle = self._files[place.path]
        found = handle.get_tensor(name) if place.part is None else place.part.of(handle.get_slice(place.stored))
        return found.to(self._device)

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes in which the tensors are stored. This reads only headers."""
        return {self._files[place.path].get_slice(place.stored)[:0].dtype for place in self._where.values()}

    def sizes(self) -> dict[str, int]:
        """Return the elements of each tensor. This reads only headers."""
        return {name: self._size(place) for name, place in self._where.items()}

    def _size(self, place: _Place) -> int:
        shape = self._files[place.path].get_slice(place.stored).get_shape()
        return math.prod(shape) if place.part is None else place.part.size(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def _places(path: Path, handle: Any) -> Iterator[tuple[str, _Place]]:
    """Yield (name, place) of each tensor in a safetensors file; experts that are stored together come one by one."""
    stored_names: list[str] = handle.keys()
    for stored in stored_names:
        experts = [
            (name, _Place(path, stored, part)) for name, part in parts(stored, handle.get_slice(stored).get_shape())
        ]
        yield from experts or [(stored, _Place(path, stored))]


class Stored(Mapping[str, Tensor]):
    """The tensors of one safetensors file, read one by one in the order of `names` (default: sorted). Raises
    ValueError when the file has other names.
    """

    def __init__(self, path: Path, names: Sequence[str] | None = None) -> None:
        self._file = safe_open(path, framework="pt")
        stored = sorted(self._file.keys())
        self._names = tuple(stored if names is None else names)
        if odd := sorted(set(stored) ^ set(self._names)):
            raise ValueError(f"{path} and its weight table differ in {len(odd)} names, the first is {odd[0]}")

    def __getitem__(self, name: str) -> Tensor:
        return self._file.get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint folder, sorted: those that its index names, or all without an
    index. Raises ValueError.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = sorted({folder / name for name in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if missing := [path.name for path in files if not path.is_file()]:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which its index names: download the checkpoint again")
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file: convert the checkpoint to safetensors first")
    return files


def merge(weight: Tensor, a: Tensor, b: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    """Return weight [out, in] + scale * b [out, r] @ a [r, in] as a new tensor of `dtype`, on the adapter's device.

    All arithmetic is elementwise fp32: the products of rank 0, 1, 2 ... are added in that order, the sum is scaled,
    the weight is added, and the result is rounded once to `dtype`. Raises ValueError for shapes that do not fit.
    """
    weight = weight.to(a.device)
    out_features, in_features = weight.shape
    rank = a.shape[0]
    if tuple(a.shape) != (rank, in_features) or tuple(b.shape) != (out_features, rank):
        raise ValueError(f"adapter {tuple(b.shape)} x {tuple(a.shape)} does not fit a weight of {tuple(weight.shape)}")
    a, columns = a.float(), b.float().t().contiguous()
    result = torch.empty(out_features, in_features, dtype=dtype, device=a.device)
    step = max(1, _CHUNK // in_features) if a.device.type == "cpu" else out_features
    for start in range(0, out_features, step):
        rows = slice(start, min(start + step, out_features))
        total = torch.mul(columns[0, rows, None], a[0])
        product = torch.empty_like(total)
        for r in range(1, rank):
            torch.mul(columns[r, rows, None], a[r], out=product)
            total.add_(product)
        result[rows] = total.mul_(scale).add_(weight[rows].float()).to(dtype)
    return result


def explain_rounding(base: Mapping[str, Tensor], held: set[torch.dtype]) -> str:
    """Return why weights held in these dtypes are not the stored ones, or "" when they are, bit for bit."""
    stored = (
        base.dtypes() if isinstance(base, BaseWeights | seeded.SeededWeights) else {next(iter(base.values())).dtype}
    )
    lossy = [(a, b) for a in stored for b in held if b not in (a, torch.float32)]
    return "".join(f"the base model is stored in {a}, and the trainer holds it in {b}" for a, b in lossy[:1])


def adapter_targets(adapter: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the (A [r, in], B [out, r]) of an adapter in PEFT names, by Hugging Face weight name. Raises ValueError
    for other names, and for a B without its A.
    """
    targets: dict[str, tuple[Tensor, Tensor]] = {}
    for name in adapter:
        if not name.startswith(PEFT_PREFIX) or not name.endswith((PEFT_A, PEFT_B)):
            raise ValueError(f"{name} is not a PEFT LoRA tensor name")
        if name.endswith(PEFT_A):
            stem = name.removesuffix(PEFT_A)
            targets[stem.removeprefix(PEFT_PREFIX) + ".weight"] = (adapter[name], adapter[stem + PEFT_B])
    if 2 * len(targets) != len(adapter):
        raise ValueError("the adapter holds a lora_B without its lora_A")
    return targets


@torch.no_grad()
def merged_tensors(
    base: Mapping[str, Tensor], adapter: Mapping[str, Tensor], scale: float, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield (Hugging Face name, contiguous tensor of `dtype`) for every base tensor, in the order of `base`.

    `base` is a `BaseWeights`, or a mapping in its order. `adapter` has tensors by PEFT name; if it is empty, the result
    is the base alone. `scale` is alpha / rank. Raises ValueError if the adapter names a weight that the base lacks.
    """
    targets = adapter_targets(adapter)
    if unknown := sorted(set(targets) - set(base)):
        raise ValueError(f"the adapter has {unknown[0]} (and {len(unknown) - 1} more) that the base model lacks")
    for name in base:
        weight = base[name]
        if name in targets:
            yield name, merge(weight, *targets[name], scale, dtype)
        else:
            yield name, weight.to(dtype, copy=True).contiguous()

"""Checks a LoRA adapter as vLLM's kernels read it: by sums of the stacked A and B of its slot, under the trainer's names.

The sha256 of an adapter's file says nothing of what vLLM makes of it (cast, scale, packing; expert deltas that it drops with
HTTP 200). This reads what is multiplied: `lora_a_stacked` and `lora_b_stacked` of linears, and for experts what the context of
their kernel points to. vLLM 0.25 and 0.32 lay both out in the same way (read in their sources; 0.32 run). Nothing is written.
Every number of a slot is in a tensor of the table, or zero. `FOLDERS` holds which of vLLM's adapters came from which folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.lora.worker_manager import WorkerLoRAManager

from artd_workers.models.codec import PEFT_A, PEFT_B, PEFT_PREFIX, peft_names
from artd_workers.transfer.checksum import sums_of_stacked

from .hashing import Entry, WeightError

FOLDERS: dict[str, int] = {}
"""Folder -> vLLM's number of the adapter that it read there. Names are used again for other adapters, folders never."""


@dataclass(frozen=True)
class Part:
    """What a slot holds of one kind: the names of its tensors, and the tensors [len(names), ...], with room for larger ranks."""

    names: tuple[str, ...]
    stacked: Tensor


def install() -> None:
    """Record every adapter that vLLM reads. Call it before the model is built."""
    stock = WorkerLoRAManager._load_adapter

    def load(self: Any, request: Any) -> Any:
        found = stock(self, request)
        FOLDERS[request.lora_path] = request.lora_int_id
        return found

    WorkerLoRAManager._load_adapter = load


@torch.no_grad()
def check(runner: Any, folder: str, table: list[Entry]) -> dict[str, float]:
    """Compare the slot of the adapter in this folder with the table: each tensor by its sum, all else must be zero.

    Returns how many `tensors` were compared, and their `bytes`. Raises WeightError.
    """
    manager = runner.lora_manager._adapter_manager
    wanted = {entry.name: entry for entry in table}
    if not wanted:
        raise WeightError(
            "the checkpoint lists no sums of its adapter, so nothing can be verified; train and commit a new step"
        )
    found: list[tuple[Entry, Tensor]] = []
    beside: list[tuple[str, Tensor]] = []
    for part in _parts(manager, _slot(manager, folder)):
        rows = [wanted.pop(name) for name in part.names if name in wanted]
        if not rows:
            beside.append((part.names[0], part.stacked.any()))
            continue
        if len(rows) != len(part.names):
            raise WeightError(f"the adapter has only {len(rows)} of {len(part.names)} tensors like {part.names[0]}")
        own, rest = _cut(part, rows[0])
        found += zip(rows, sums_of_stacked(own), strict=True)
        beside += [(part.names[0], one.any()) for one in rest]
    if wanted:
        raise WeightError(f"vLLM has no place for {len(wanted)} tensors of the adapter, the first is {min(wanted)}")
    sums = torch.stack([value for _, value in found]).tolist()
    wrong = [entry.name for (entry, _), value in zip(found, sums, strict=True) if value != entry.known]
    if wrong:
        raise WeightError(
            f"{len(wrong)} of {len(found)} tensors of the adapter in vLLM's slot are not those committed, the first is {wrong[0]}"
        )
    _all_zero(beside)
    return {"tensors": float(len(found)), "bytes": float(sum(_bytes(entry) for entry, _ in found))}


def _slot(manager: Any, folder: str) -> int:
    number = FOLDERS.get(folder)
    if number is None:
        raise WeightError(f"vLLM has read no adapter from {folder}")
    if number not in manager.lora_index_to_id:  # other adapters have evicted it; load it again, as a request would
        manager.activate_adapter(number)
    return int(manager.lora_index_to_id.index(number))


def _parts(manager: Any, slot: int) -> Iterator[Part]:
    for path, layer in manager.modules.items():
        yield from (
            _experts(path, layer, slot)
            if hasattr(layer, "w13_lora_a_stacked")
            else _linears(path, layer, manager.packed_modules_mapping, slot)
        )


def _linears(path: str, layer: Any, packed: dict[str, list[str]], slot: int) -> Iterator[Part]:
    stem, _, last = path.rpartition(".")
    names = packed.get(last) or [last]
    if not len(names) == len(layer.lora_a_stacked) == len(layer.lora_b_stacked):
        raise WeightError(f"{path} ({type(layer).__name__}) has {len(layer.lora_a_stacked)} slices for {names}")
    for name, a, b in zip(names, layer.lora_a_stacked, layer.lora_b_stacked, strict=True):
        first, second = peft_names(f"{stem}.{name}.weight")
        yield Part((first,), a[slot])
        yield Part((second,), b[slot])


def _experts(path: str, layer: Any, slot: int) -> Iterator[Part]:
    context = layer._moe_kernel.fused_experts._lora_context
    if not bool(context.adapter_enabled[slot]):
        raise WeightError(f"vLLM computes {path} without the adapter: its kernel has the slot switched off")
    if len(context.w13_lora_a_stacked) != 2:
        raise WeightError(f"{path} ({type(layer).__name__}) has gate and up in one tensor, which artd does not know")
    kinds = {
        "gate_proj": (context.w13_lora_a_stacked[0], context.w13_lora_b_stacked[0]),
        "up_proj": (context.w13_lora_a_stacked[1], context.w13_lora_b_stacked[1]),
        "down_proj": (context.w2_lora_a_stacked[0], context.w2_lora_b_stacked[0]),
    }
    for kind, pair in kinds.items():
        for suffix, stacked in zip((PEFT_A, PEFT_B), pair, strict=True):
            names = (f"{PEFT_PREFIX}{path}.{e}.{kind}{suffix}" for e in range(stacked.shape[1]))
            yield Part(tuple(names), stacked[slot])


def _cut(part: Part, entry: Entry) -> tuple[Tensor, list[Tensor]]:
    """Return (the tensors [n, rows, columns], what else is in the slot)."""
    stacked = part.stacked
    rows, columns = entry.shape
    if str(stacked.dtype) != f"torch.{entry.dtype}" or rows > stacked.shape[1] or columns > stacked.shape[2]:
        raise WeightError(
            f"{entry.name} is {entry.dtype} {entry.shape}, vLLM holds {stacked.dtype} {tuple(stacked.shape[1:])} for it"
        )
    return stacked[:, :rows, :columns], [stacked[:, rows:], stacked[:, :rows, columns:]]


def _all_zero(beside: list[tuple[str, Tensor]]) -> None:
    odd = [
        name for (name, _), value in zip(beside, torch.stack([one for _, one in beside]).tolist(), strict=True) if value
    ]
    if odd:
        raise WeightError(
            f"vLLM's slot holds numbers that are not of the adapter, beside {odd[0]} and {len(odd) - 1} more"
        )


def _bytes(entry: Entry) -> int:
    rows, columns = entry.shape
    return rows * columns * int(getattr(torch, entry.dtype).itemsize)

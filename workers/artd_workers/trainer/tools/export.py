"""`python -m artd_workers.trainer.tools.export`: writes a checkpoint as a Hugging Face folder, merged or fully trained.

`artctl export --format merged` runs it. It uses the same merge as serving, so the bits are those that the engine was served.
Where the checkpoint's `weights.json` lists the served tensors in the same dtype, every tensor is compared with it. Experts have
a checkpoint's names, one by one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from artd_schema.data.manifest import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FILE,
    MODEL_FILE,
    WEIGHTS_FILE,
    WeightEntry,
    WeightTable,
)
from artd_schema.run.families import SEEDED
from artd_workers.trainer.checkpoint.folder import is_listed
from artd_workers.transfer.merge import Stored, merged_tensors, open_base

SHARD_BYTES = 4 << 30
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", SEEDED)


class ExportError(Exception):
    """A checkpoint that cannot be exported: the base or the adapter is not what the step was trained on."""


def export(base: Path, checkpoint: Path, out: Path, dtype: torch.dtype, shard_bytes: int = SHARD_BYTES) -> int:
    """Write `out`, which must not exist: weights, config and tokenizer. Returns the number of tensors.

    Weights have `dtype`, in shards of at most `shard_bytes`; a larger tensor gets a shard of its own. Raises ExportError, and
    ValueError from the merge.
    """
    tensors, expected = _weights(base, checkpoint, dtype), _read_served_table(checkpoint, dtype)
    writer = _Shards(out, shard_bytes)
    out.mkdir(parents=True)
    for name, tensor in tensors:
        if expected and not ((entry := expected.pop(name, None)) and is_listed(tensor, entry)):
            raise ExportError(
                f"{name} is not what the step's weights.json lists: the base model {base} or the checkpoint has changed"
            )
        writer.add(name, tensor)
    if expected:
        raise ExportError(f"{len(expected)} tensors of weights.json are not there, the first is {min(expected)}")
    for path in sorted(base.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_NOT_COPIED):
            shutil.copyfile(path, out / path.name)
    model: dict[str, Any] = json.loads((base / "config.json").read_text())
    model.pop("dtype", None)
    (out / "config.json").write_text(json.dumps(model | {"torch_dtype": _name(dtype)}, indent=2) + "\n")
    return writer.finish()


def _weights(base: Path, checkpoint: Path, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor of `dtype`) of every weight of a checkpoint, whose folder holds an adapter or all weights."""
    if (full := checkpoint / MODEL_FILE).is_file():
        return merged_tensors(Stored(full), {}, 1.0, dtype)
    config = json.loads((checkpoint / ADAPTER_CONFIG_FILE).read_text())
    adapter = load_file(checkpoint / ADAPTER_FILE)
    return merged_tensors(open_base(base), adapter, config["lora_alpha"] / config["r"], dtype)


def _read_served_table(checkpoint: Path, dtype: torch.dtype) -> dict[str, WeightEntry]:
    """Return the entries of the merged tensors, by name, if they were served in this dtype; else nothing."""
    path = checkpoint / WEIGHTS_FILE
    if not path.is_file():
        return {}
    table = msgspec.json.decode(path.read_bytes(), type=WeightTable)
    if table.mode != "merged" or any(entry.dtype != _name(dtype) for entry in table.tensors):
        return {}
    return {entry.name: entry for entry in table.tensors}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class _Shards:
    """Collects tensors and writes `model.safetensors`, or numbered shards with an index."""

    def __init__(self, out: Path, limit: int) -> None:
        self._out = out
        self._limit = limit
        self._held: dict[str, Tensor] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []
        self._total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        size = tensor.numel() * tensor.element_size()
        if self._held and self._held_bytes + size > self._limit:
            self._flush()
        self._held[name] = tensor
        self._held_bytes += size
        self._total += size

    def _flush(self) -> None:
        save_file(self._held, self._out / f"part-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def finish(self) -> int:
        self._flush()
        count = len(self._shards)
        names = [MODEL_FILE] if count == 1 else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        for number, name in enumerate(names):
            (self._out / f"part-{number}").rename(self._out / name)
        where = {tensor: name for name, shard in zip(names, self._shards, strict=True) for tensor in shard}
        if count > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": where}
            (self._out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        return len(where)


def main() -> int:
    parser = argparse.ArgumentParser(description="A checkpoint as a Hugging Face folder.")
    parser.add_argument("--base", type=Path, required=True, help="Hugging Face folder of the base model")
    parser.add_argument(
        "--checkpoint", type=Path, required=True, help="folder with the adapter or all weights (and weights.json)"
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    try:
        count = export(args.base, args.checkpoint, args.out, getattr(torch, args.dtype))
    except (ExportError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(f"{count} tensors of {args.dtype} written", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())

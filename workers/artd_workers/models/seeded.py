"""Base models whose weights are drawn, not stored: `config.json`, a tokenizer and `seeded.json` in place of safetensors.

They give tests and measurements a model of any real shape without 61 GB of random weights on a disk, because trainer and engine
call the same function. Run `python -m artd_workers.models.seeded OUT --config FILE [--seed N] [--std S]` to make such a folder.
A weight depends only on seed, std and its name, and is the same on every device, bit for bit (integers and one rounding; no
generator of torch's). The folder's digest pins all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from artd_schema.run.families import SEEDED

from .folder import create_folder, write_json
from .registry import plan_for, read_config
from .words import write_tokenizer

VERSION = 1
STD = 0.02
_CHUNK = 1 << 24
_BITS = 24
"""Bits of a drawn number. All such numbers, and the values halfway between two, are exact in fp32."""


@dataclass(frozen=True)
class Draw:
    """The content of `seeded.json`. `std`: standard deviation of matrices, whose numbers are uniform; norms are 1."""

    seed: int
    std: float


class SeededWeights(Mapping[str, Tensor]):
    """The weights of a seeded folder by Hugging Face name, sorted. Each is drawn on `device`, in bf16, when it is read.

    Raises ValueError for a folder of another version.
    """

    def __init__(self, folder: Path, device: str | torch.device = "cpu") -> None:
        self._draw, self._config, self._device = _read(folder), read_config(folder), torch.device(device)
        plan = plan_for(self._config)
        self._names = tuple(sorted(part for row in plan.codec.rows for part in row.parts))
        self._known = frozenset(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._known:
            raise KeyError(name)
        shape = size_of(name, self._config)
        if len(shape) == 1:
            return torch.ones(shape, dtype=torch.bfloat16, device=self._device)
        return draw_matrix(name, shape, self._draw, self._device)

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the tensors, without drawing any."""
        return {torch.bfloat16}

    def sizes(self) -> dict[str, int]:
        """Return the number of elements of each tensor, without drawing any."""
        return {name: math.prod(size_of(name, self._config)) for name in self._names}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def draw_matrix(name: str, shape: tuple[int, ...], draw: Draw, device: torch.device) -> Tensor:
    """Return a matrix [out, in] in bf16: element i is a hash of (seed, name, i), scaled to between -std √3 and +std √3."""
    key = int.from_bytes(hashlib.sha256(f"{VERSION} {draw.seed} {name}".encode()).digest()[:8], "little", signed=True)
    scale = torch.tensor(draw.std * 3**0.5 / (1 << _BITS - 1), dtype=torch.float32, device=device)
    out = torch.empty(shape[0] * shape[1], dtype=torch.bfloat16, device=device)
    for begin in range(0, len(out), _CHUNK):
        end = min(begin + _CHUNK, len(out))
        number = _mix(torch.arange(begin, end, device=device), key) & ((1 << _BITS) - 1)
        middle = (2 * number - ((1 << _BITS) - 1)).to(torch.float32).mul_(0.5)
        out[begin:end] = middle.mul_(scale)
    return out.view(shape)


def _mix(x: Tensor, key: int) -> Tensor:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014) to key + x, on int64 [n], which wraps around."""
    x = x.mul_(-7046029254386353131).add_(key)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        x = x.bitwise_xor_((x >> shift) & ((1 << 64 - shift) - 1)).mul_(factor)
    return x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))


def size_of(name: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of a weight of a decoder (`base.decoder_plan`)."""
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    inner = int(config["moe_intermediate_size" if ".experts." in name else "intermediate_size"])
    query, key = heads * head, int(config.get("num_key_value_heads") or heads) * head
    vocab = (int(config["vocab_size"]), hidden)
    sizes: dict[str, tuple[int, ...]] = {
        "embed_tokens": vocab, "lm_head": vocab, "q_proj": (query, hidden), "k_proj": (key, hidden),
        "v_proj": (key, hidden), "o_proj": (hidden, query), "gate": (int(config.get("num_experts", 0)), hidden),
        "gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner), "q_norm": (head,),
        "k_norm": (head,),
    }  # fmt: skip
    return sizes.get(name.removesuffix(".weight").rpartition(".")[2], (hidden,))


def make(out: Path, config: Mapping[str, Any], seed: int = 0, std: float = STD) -> Path:
    """Write `out` unless it exists. Returns `out`. `config`: a Hugging Face config, whose tokens become words `w0`, `w1`, ...

    Raises UnsupportedModel for a model that artd does not train.
    """
    plan_for(config)
    if out.exists():
        return out
    with create_folder(out) as partial:
        write_json(partial / "config.json", dict(config) | {"torch_dtype": "bfloat16"})
        write_json(partial / SEEDED, {"version": VERSION, "seed": seed, "std": std})
        write_tokenizer(partial, int(config["vocab_size"]), int(config["max_position_embeddings"]))
    return out


def _read(folder: Path) -> Draw:
    found = json.loads((folder / SEEDED).read_text())
    if found.get("version") != VERSION:
        raise ValueError(
            f"{folder / SEEDED} is of version {found.get('version')}, and this artd draws version {VERSION}"
        )
    return Draw(int(found["seed"]), float(found["std"]))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m artd_workers.models.seeded", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--config", type=Path, required=True, help="a config.json, or a folder that holds one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--std", type=float, default=STD)
    args = parser.parse_args()
    folder = args.config if args.config.is_dir() else args.config.parent
    print(make(args.out.absolute(), read_config(folder), args.seed, args.std))
    return 0


if __name__ == "__main__":
    sys.exit(main())

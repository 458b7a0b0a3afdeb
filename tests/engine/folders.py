"""Checkpoint folders for the fake server: there is no model behind them, and scores are a function of the weights' hashes.

It uses only the standard library, because the fake server imports it too.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

PROMPTS = ((5, 6, 7, 8), (9, 10, 11))


def scores(seed: str, prompt: list[int] | tuple[int, ...]) -> list[float]:
    """Logprobs of tokens 1..n-1, different for every seed and position."""
    return [
        -1 - int.from_bytes(hashlib.sha256(f"{seed}{i}{t}".encode()).digest()[:2]) / 65536 for i, t in enumerate(prompt)
    ][1:]


def seed_of_table(rows: list[list[Any]]) -> str:
    return "".join(row[3] for row in rows)


def seed_of_adapter(folder: Path) -> str:
    return hashlib.sha256((folder / "adapter_model.safetensors").read_bytes()).hexdigest()


def safetensors(tensors: dict[str, bytes]) -> bytes:
    """A file of 1-D F32 tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, raw in tensors.items():
        header[name] = {"dtype": "F32", "shape": [len(raw) // 4], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def sha(folder: Path) -> str:
    """The sha of a checkpoint folder's manifest."""
    return hashlib.sha256((folder / "manifest.json").read_bytes()).hexdigest()


def tensors_of(mode: str, step: int) -> dict[str, bytes]:
    """Two tensors of 8 floats."""
    prefix = "base_model.model.layers.0.q_proj." if mode == "lora" else "layers.0."
    return {f"{prefix}{name}": struct.pack("<8f", *range(step + i, step + i + 8)) for i, name in enumerate("ab")}


def merged_seed(step: int) -> str:
    """What the scores of an engine are made from that holds this step, merged."""
    return "".join(hashlib.sha256(raw).hexdigest() for raw in tensors_of("merged", step).values())


def held_rows(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The fake server holds a tensor as it is in the file."""
    return [row | {"sha256": "", "sum64": sum64(row["sha256"])} for row in rows]


def sum64(sha: str) -> int:
    """What stands for the sum of a tensor."""
    return int(sha[:15], 16)


def commit(folder: Path, name: str, raw: bytes) -> None:
    """Put another file into a checkpoint, in all that says what it is."""
    (folder / name).write_bytes(raw)
    manifest = json.loads((folder / "manifest.json").read_text())
    (entry,) = (file for file in manifest["files"] if file["name"] == name)
    entry |= {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def write(folder: Path, mode: str, step: int, parameters: str = "lora") -> str:
    """Write a checkpoint folder; returns the sha of its manifest."""
    folder.mkdir(parents=True)
    tensors = tensors_of(mode, step)
    (folder / "adapter_model.safetensors").write_bytes(safetensors(tensors))
    (folder / "adapter_config.json").write_text("{}")
    rows = [
        {"name": n, "dtype": "float32", "shape": [8], "sha256": hashlib.sha256(r).hexdigest()}
        for n, r in tensors.items()
    ]
    (folder / "weights.json").write_text(
        json.dumps({"mode": mode, "tensors": rows, "held": held_rows(rows) if mode == "lora" else []})
    )
    files = [
        {"name": p.name, "bytes": p.stat().st_size, "sha256": hashlib.sha256(p.read_bytes()).hexdigest()}
        for p in sorted(folder.iterdir())
    ]
    seed = seed_of_adapter(folder) if mode == "lora" else "".join(row["sha256"] for row in rows)
    canary = {"prompts": PROMPTS, "logprobs": [scores(seed, p) for p in PROMPTS], "max_abs": 1e-4, "mean_abs": 1e-5}
    if mode == "lora":
        canary |= {"base": [scores("", p) for p in PROMPTS], "rounding": 1e-6}
    manifest = {"run": "toy", "step": step, "epoch": step, "lineage": 0, "parent": "", "batch": "", "base_digest": "",
                "spec_digest": "", "instance": "i", "job": 1, "fence": 1, "files": files, "canary": canary,
                "parameters": parameters}  # fmt: skip
    raw = json.dumps(manifest).encode()
    (folder / "manifest.json").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()

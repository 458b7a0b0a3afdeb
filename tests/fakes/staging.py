"""A checkpoint folder as a trainer stages it: tiny, valid, with a real manifest.

Owner of: nothing. Invariants: imports artd_schema only, so that fake workers start fast.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from artd_schema import worker as w
from artd_schema.codec import digest, to_json
from artd_schema.manifest import Canary, CheckpointManifest, FileEntry


def stage(folder: Path, order: w.Run, base_digest: str = "b" * 64, **changes: Any) -> str:
    """Write the result of `order` into `folder` as a trainer would; returns the sha of its manifest."""
    folder.mkdir(parents=True)
    files = {"weights.bin": f"step {order.step}".encode(), "weights.json": b"{}"}
    for name, data in files.items():
        (folder / name).write_bytes(data)
    fields: dict[str, Any] = {
        "run": "r",
        "step": order.step,
        "epoch": order.epoch,
        "lineage": order.lineage,
        "parent": order.parent.sha if order.parent else "",
        "batch": order.batch_sha,
        "base_digest": base_digest,
        "spec_digest": "",
        "instance": order.instance,
        "job": order.job,
        "fence": order.fence,
        "files": tuple(FileEntry(name, len(data), digest(data)) for name, data in files.items()),
        "canary": Canary(prompts=(), logprobs=(), max_abs=1e-4, mean_abs=1e-5),
        "metrics": {"loss": 0.5},
    }
    manifest = to_json(CheckpointManifest(**(fields | changes)))
    (folder / "manifest.json").write_bytes(manifest)
    return digest(manifest)

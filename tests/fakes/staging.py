"""A checkpoint folder as a trainer stages it: tiny and valid, with a real manifest, written by the trainer's own code. It
imports nothing heavy, so that fake workers start fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from msgspec import UNSET

from artd_schema.data.manifest import Canary
from artd_schema.wire import worker as w
from artd_workers.trainer.checkpoint.writer import Files


def stage(folder: Path, order: w.Run, base_digest: str = "b" * 64, **changes: Any) -> str:
    """Write the result of `order` into `folder` as a trainer would, past the same crash points; returns the sha of its
    manifest."""
    files = Files(folder)
    files.add("weights.bin", f"step {order.step}".encode())
    files.weights("merged", ())
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
        "canary": Canary(prompts=(), logprobs=(), max_abs=1e-4, mean_abs=1e-5),
        "metrics": {"loss": 0.5},
        "learning": order.learning or UNSET,
    }
    return files.finish(**(fields | changes))

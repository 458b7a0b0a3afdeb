"""Losses by name: those of artd. A package may bring others (`packages`).

The functions are in `artd_workers.trainer.step.losses`; this table lets the daemon refuse an unknown loss without importing them.
"""

from __future__ import annotations

LOSSES: dict[str, tuple[str, ...]] = {
    "cispo": (),
}
"""`loss.kind` -> the names that its `loss.params` may have."""

"""Losses by name: those of artd, and what is known of one that an installed package brings.

The functions are in `artd_workers.trainer.step.losses`; this table lets the daemon refuse an unknown loss without importing them.
"""

from __future__ import annotations

from msgspec import Struct

LOSSES: dict[str, tuple[str, ...]] = {
    "cispo": (),
}
"""`loss.kind` -> the names that its `loss.params` may have."""
GROUP = "artd.losses"
"""Entry point group in which a package offers losses: NAME = "package.module:function"."""


class LossCode(Struct, frozen=True, kw_only=True):
    """A package's loss. kind: its name; target: `package.module:function`; distribution, version: of the package; digest: of the
    package's files, which is the name of their copy in DATA/code."""

    kind: str
    target: str
    distribution: str
    version: str
    digest: str

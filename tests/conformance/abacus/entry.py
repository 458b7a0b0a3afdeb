"""The entry of an engine that is outside the package: one folder and this entry. The engine counts on fingers."""

from __future__ import annotations

from artd_schema.run.engines import ENGINES, EngineKind

ABACUS = EngineKind(
    name="abacus",
    title="Abacus",
    runtime="abacus",
    versions=("7.1",),
    packages=("abacus",),
    module="abacus",
    worker="tests.conformance.abacus.engine",
    dialect="tests.conformance.abacus.dialect",
    adapter_rank=8,
    floor=-1e4,
)


def register() -> None:
    """Make it known in this process, for good."""
    ENGINES[ABACUS.name] = ABACUS

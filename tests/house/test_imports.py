"""Every module is imported by the interpreter that uses it: the daemon's, the trainer's or the engine's."""

from __future__ import annotations

import pytest

from artd.runtimes import registry
from tests.house.imports import RUNTIME, failures
from tests.house.modules import importable, modules

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]


def test_every_module_of_a_worker_is_imported_in_one_of_the_runtimes() -> None:
    left = failures(importable())
    assert left, "the daemon's interpreter has torch"
    for runtime in ("megatron", "vllm"):
        found = failures(sorted(left), registry.find(runtime).python)
        wrong = {name: why for name, why in found.items() if why not in {f"needs {p}" for p in RUNTIME}}
        assert {name: why for name, why in wrong.items() if not needs_cuda(name)} == {}, runtime
        left = {name: why for name, why in found.items() if not needs_cuda(name)}
    assert left == {}


def needs_cuda(name: str) -> bool:
    """Transformer Engine is in the runtimes for GPUs alone."""
    return "transformer_engine" in modules()[name].read_text()

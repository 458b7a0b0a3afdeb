"""A stand-in for the vllm runtime's interpreter, for tests whose trainer is real and whose engine need not be."""

from __future__ import annotations

import sys
from pathlib import Path

FAKES = Path(__file__).parent


def engine_config(root: Path) -> str:
    """Text of an artd.toml whose engine is tests/fakes/engine.py. The wrapper and its script lie beside `root`."""
    wrapper = root.with_name(f"{root.name}-engine")
    wrapper.write_text(
        f'#!/bin/sh\nARTD_FAKE_SCRIPT="{root}-script.json" exec "{sys.executable}" "{FAKES / "engine.py"}"\n'
    )
    wrapper.chmod(0o755)
    return f'[runtimes.engine]\npython = "{wrapper}"\npythonpath = ["{FAKES.parents[1]}"]\n'

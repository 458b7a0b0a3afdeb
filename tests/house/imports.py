"""Ask an interpreter which modules it cannot import: run `importing.py` in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.house.modules import PACKAGES

SCRIPT = Path(__file__).with_name("importing.py")
RUNTIME = frozenset({"torch", "megatron", "vllm", "triton"})
"""Packages that the daemon's interpreter never has."""
LIMIT_S = 280


def failures(names: list[str], python: str | Path = sys.executable) -> dict[str, str]:
    """Map each module that the interpreter cannot import to the reason."""
    folders = ":".join(sorted({str(folder.parent) for folder in PACKAGES.values()}))
    done = subprocess.run(
        [python, "-I", SCRIPT, folders], input="\n".join(names), capture_output=True, text=True, check=False,
        timeout=LIMIT_S, cwd="/", env=os.environ | _harness(), start_new_session=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def _harness() -> dict[str, str]:
    """Name this process as the harness: the engine's extension ends its process group when the harness is not alive."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    return {"ARTD_SPAWN": "1", "ARTD_HARNESS_PID": str(os.getpid()), "ARTD_HARNESS_START": started}

"""What a worker needs of its interpreter: `python -m artd_workers.probe trainer|engine` prints what is there, as one line of JSON.

Purpose: `artd doctor` asks interpreters of the user's own with it, before a daemon starts a worker there. Owner of: no state.
Invariants: nothing but the standard library is needed to answer; what imported modules print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from typing import Any

NEEDED: dict[str, tuple[str, ...]] = {
    "trainer": ("torch", "megatron.core", "numpy", "safetensors", "msgspec", "zmq"),
    "engine": ("torch", "vllm", "numpy", "safetensors", "msgspec", "zmq"),
}
ON_GPU: dict[str, tuple[str, ...]] = {"trainer": ("transformer_engine.pytorch", "triton"), "engine": ("triton",)}
"""What is needed besides where torch sees a GPU."""


def look(kind: str) -> dict[str, Any]:
    """versions: of what could be imported; failed: why the rest could not; cuda: what torch was built for, "" on a CPU;
    refused: why artd does not take this engine."""
    versions: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in NEEDED[kind]:
        _take(name, versions, failed)
    gpus, cuda = _gpus() if "torch" in versions else (0, "")
    for name in ON_GPU[kind] if gpus else ():
        _take(name, versions, failed)
    return {
        "python": platform.python_version(),
        "versions": versions,
        "failed": failed,
        "gpus": gpus,
        "cuda": cuda,
        "refused": _refused(versions),
    }


def _take(name: str, versions: dict[str, str], failed: dict[str, str]) -> None:
    try:
        module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        failed[name] = f"{type(error).__name__}: {error}"
        return
    whole = sys.modules[name.partition(".")[0]]
    versions[name] = str(getattr(module, "__version__", "") or getattr(whole, "__version__", ""))


def _gpus() -> tuple[int, str]:
    import torch

    return torch.cuda.device_count(), torch.version.cuda or ""


def _refused(versions: dict[str, str]) -> str:
    if "vllm" not in versions or "msgspec" not in versions:
        return ""
    from artd_workers.engines.adapter import VLLM, EngineError, capabilities

    try:
        capabilities(VLLM, versions["vllm"])
    except EngineError as error:
        return str(error)
    return ""


def main(kind: str) -> None:
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        out.write(json.dumps(look(kind)) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])

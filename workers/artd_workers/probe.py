"""`python -m artd_workers.probe trainer|engine [KIND]`: prints what an interpreter has of a worker's needs, as one line of
JSON.

`artd doctor` runs it in interpreters of the user's own, before a daemon starts a worker there. It needs only the standard
library. What imported modules print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import sys
from typing import Any

from artd_schema.run.engines import DEFAULT, ENGINES, EngineKind, engine_kind

NEEDED: dict[str, tuple[str, ...]] = {
    "trainer": ("torch", "megatron.core", "numpy", "safetensors", "msgspec", "zmq"),
    "engine": ("torch", "numpy", "safetensors", "msgspec", "zmq"),
}
"""Modules that any kind of this worker needs; an engine's own module comes second."""
ON_GPU: dict[str, tuple[str, ...]] = {"trainer": ("transformer_engine.pytorch", "triton"), "engine": ("triton",)}
"""Further modules, needed where torch sees a GPU."""


def list_needed(worker: str, engine: EngineKind) -> tuple[str, ...]:
    """Return the modules that this worker imports, in the order in which they are tried."""
    first, *others = NEEDED[worker]
    return (first, engine.module, *others) if worker == "engine" else (first, *others)


def look(worker: str, engine: EngineKind = ENGINES[DEFAULT]) -> dict[str, Any]:
    """Import what the worker needs, and return the findings.

    `versions`: of modules that could be imported; `failed`: why the others could not; `cuda`: the CUDA version torch was built
    for, "" on a CPU; `refused`: why artd does not support this engine.
    """
    versions: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name in list_needed(worker, engine):
        _take(name, versions, failed)
    gpus, cuda = _gpus() if "torch" in versions else (0, "")
    for name in ON_GPU[worker] if gpus else ():
        _take(name, versions, failed)
    return {
        "python": platform.python_version(),
        "versions": versions,
        "failed": failed,
        "gpus": gpus,
        "cuda": cuda,
        "refused": engine.refusal(versions[engine.module]) if engine.module in versions else "",
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


def main(worker: str, kind: str = DEFAULT) -> None:
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        out.write(json.dumps(look(worker, engine_kind(kind))) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

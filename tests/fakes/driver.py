"""A stand-in for NVIDIA's driver (`libcuda.c`), whether or not this machine has one; a process finds it by LD_LIBRARY_PATH."""

from __future__ import annotations

import os
from pathlib import Path

from tests.compiled import library

SOURCE = Path(__file__).with_name("libcuda.c")
CRASHES, HANGS = -1, -2
"""For `init`."""


def environment(folder: Path, gpus: int = 1, init: int | None = None, visible: str = "0") -> dict[str, str]:
    """Of a process that meets a driver with this many GPUs. folder: for the library; init: what cuInit answers; visible: the GPUs'
    numbers, as in CUDA_VISIBLE_DEVICES."""
    folder.mkdir(exist_ok=True)
    if not (path := folder / "libcuda.so.1").exists():
        path.symlink_to(library(SOURCE))
    found = {
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))),
        "CUDA_VISIBLE_DEVICES": visible,
        "FAKE_CUDA_GPUS": str(gpus),
    }
    return found if init is None else found | {"FAKE_CUDA_INIT": str(init)}

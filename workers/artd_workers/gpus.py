"""Tells whether NVIDIA's driver shows this process a GPU, without importing torch (seconds) or an engine (a minute).

A run that wants a GPU ends at once where there is none (`refusal`). A process of its own, `python -I -S gpus.py`, asks the
driver: so the worker's own CUDA state stays untouched, and a driver that crashes or hangs is an answer too. This file therefore
imports only the standard library. The driver itself interprets CUDA_VISIBLE_DEVICES.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from typing import Any

LIBRARY = "libcuda.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
_ASK_S = 120.0
"""Seconds for the driver's answer. Without its persistence daemon it first wakes every GPU of the machine."""
_NOT_READY = 802
"""CUDA's code for a machine that has just started, whose NVSwitches are not up. It is not a refusal: five refusals within seconds would
make the daemon give the worker up."""


def refusal(field: str, device: str) -> str:
    """Return why a spec whose `field` wants this device cannot run here, "" when it can."""
    if device != "cuda" or not (why := obstacle() or _build()):
        return ""
    visible = f" ({VISIBLE} is {os.environ[VISIBLE]!r})" if VISIBLE in os.environ else ""
    return (
        f"{field} is cuda, and no GPU can be used on {os.uname().nodename}: {why}{visible}; start artd where one can, or a run with "
        f"another {field} (auto, cpu)"
    )


def obstacle(timeout_s: float = _ASK_S) -> str:
    """Return why no GPU can be used, "" when one can."""
    argv = [sys.executable, "-I", "-S", __file__]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"NVIDIA's driver did not answer within {timeout_s:g} s, see dmesg"
    if done.returncode:
        last = "".join(done.stderr.strip().splitlines()[-1:])
        return f"asking NVIDIA's driver ended with status {done.returncode} {last}".strip()
    return done.stdout.strip()


def _build() -> str:
    """Return why the torch of this interpreter cannot use a GPU on any machine, "" when it may."""
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""
    if not version.endswith("+cpu"):
        return ""
    return f"torch {version} of {sys.executable} is built without CUDA: install a CUDA build of torch there"


def look(load: Callable[[str], Any] = ctypes.CDLL) -> str:
    """Return what `obstacle` returns, but ask in this process."""
    try:
        driver = load(LIBRARY)
    except OSError as error:
        return f"NVIDIA's driver cannot be loaded, {error}"
    count = ctypes.c_int()
    if code := driver.cuInit(0):
        return "" if code == _NOT_READY else f"cuInit says {_words(driver, code)}"
    if code := driver.cuDeviceGetCount(ctypes.byref(count)):
        return f"cuDeviceGetCount says {_words(driver, code)}"
    return "" if count.value else "NVIDIA's driver shows none"


def _words(driver: Any, code: int) -> str:
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return f"{(text.value or b'an error without a name').decode()} ({code})"


if __name__ == "__main__":
    print(look())

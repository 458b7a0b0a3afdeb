"""A short program in the trainer's interpreter: torch is never in this one.

Owner of: no state (DATA/code is `install_code`'s). Invariants: it runs the same copy of the workers' code as the daemon's
children; its words go to this command's stderr and stdout; a Ctrl-C ends it too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from ..config import ConfigError, load
from ..runtimes import registry
from ..supervise.code import install_code
from .outcome import FAILED, INTERRUPTED, CliError

_CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Threads that wait sleep instead of spinning: the engine computes beside this."""


def call(data: Path, module: str, arguments: list[str], what: str) -> None:
    """Run `python -m MODULE ARGUMENTS`. what: a noun for the error. Raises CliError(FAILED), KeyboardInterrupt."""
    try:
        own = load(data_dir=str(data)).runtimes.trainer
        runtime = None if own.python else registry.find("megatron")
    except (ConfigError, registry.RuntimeMissing) as error:
        raise CliError(FAILED, str(error)) from None
    python = str(runtime.python) if runtime else own.python
    folders = [str(install_code(data)), *(runtime.site_paths if runtime else ()), *own.pythonpath]
    done = subprocess.run(
        [python, "-m", module, *arguments],
        env={**os.environ, **_CALM, "PYTHONPATH": os.pathsep.join(folders)},
        check=False,
    )
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise CliError(FAILED, f"the {what} ended with status {done.returncode}; its words are above", "artd doctor")

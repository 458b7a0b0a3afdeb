"""Runs a short program in the trainer's interpreter; this one never imports torch.

The program runs the same copy of the workers' code as the daemon's children (`install_code` makes it below DATA). Its output
goes to this command's stdout and stderr, and Ctrl-C ends it too.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from artd.config import ConfigError, load
from artd.runtimes import registry
from artd.supervise.code import install_code

from .outcome import FAILED, INTERRUPTED, CliError

_CALM = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
"""Waiting threads sleep and do not spin, because the engine computes at the same time."""


def interpreter(data: Path, config: str | None) -> tuple[str, list[str]]:
    """Return (python, folders for PYTHONPATH) of the trainer, as the daemon chooses them. Raises CliError(FAILED)."""
    try:
        own = load(config, str(data)).runtimes.trainer
        if own.python:
            return own.python, list(own.pythonpath)
        found = registry.find("megatron")
    except (ConfigError, registry.RuntimeMissing) as error:
        raise CliError(FAILED, str(error)) from None
    return str(found.python), [*found.site_paths, *own.pythonpath]


def call(
    data: Path, config: str | None, module: str, arguments: list[str], what: str, more: Sequence[str] = ()
) -> None:
    """Run `python -m MODULE ARGUMENTS`; paths among the arguments are absolute.

    `config`: --config of the command line; `what`: a noun for error texts; `more`: further folders for PYTHONPATH. Raises
    CliError(FAILED) and KeyboardInterrupt.
    """
    python, folders = interpreter(data, config)
    folders += more
    done = subprocess.run(
        [python, "-m", module, *arguments],
        env={**os.environ, **_CALM, "PYTHONPATH": os.pathsep.join([str(install_code(data)), *folders])},
        cwd="/",  # so that `-m` finds no stray module in the user's folder
        check=False,
    )
    if done.returncode == INTERRUPTED:
        raise KeyboardInterrupt
    if done.returncode != 0:
        raise CliError(FAILED, f"the {what} ended with status {done.returncode}; its output is above", "artd doctor")

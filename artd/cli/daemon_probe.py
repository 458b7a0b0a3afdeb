"""Finds out which daemon runs on a data folder, and where the folder is.

It reads files and asks the kernel (flock, /proc), never the daemon. So it also works when the daemon hangs or is gone.
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from artd.datadir.lock import held
from artd_schema import paths

from .outcome import NOT_RUNNING, USAGE, CliError


class Daemon(NamedTuple):
    """A data folder's daemon. `state`: starting, ready, draining or stopped; `file`: what the present or last daemon wrote of
    itself."""

    state: str
    file: paths.DaemonFile | None

    @property
    def running(self) -> bool:
        return self.state != "stopped"


def find_daemon(data: Path) -> Daemon:
    """Return the daemon that holds the lock of `data`, or the last one that did."""
    lock = paths.read_daemon_file(data, paths.LOCK)
    told = paths.read_daemon_file(data)
    if held(data):
        if lock is not None and told is not None and (told.pid, told.ticks) == (lock.pid, lock.ticks):
            return Daemon(told.state, told)
        return Daemon("starting", lock)
    return Daemon("stopped", lock or told)


def data_dir(args: argparse.Namespace) -> Path:
    """Return the data folder: --data-dir, else $ARTD_DATA_DIR, else artd.toml, else the default.

    Raises CliError(USAGE) when artd.toml cannot be used.
    """
    given: str | None = getattr(args, "data_dir", None)
    config: str | None = getattr(args, "config", None)
    if not config and (given or os.environ.get("ARTD_DATA_DIR")):
        return paths.data_dir(given)
    from artd.config import ConfigError, load

    try:
        return Path(load(config, given).data_dir)
    except ConfigError as error:
        raise CliError(USAGE, str(error)) from None


def start_command(data: Path) -> str:
    return f"artd start --detach{data_dir_option(data)}"


def data_dir_option(data: Path) -> str:
    """Return ` --data-dir DATA` when a command needs it to reach this folder, else ""."""
    return "" if data == paths.data_dir() else f" --data-dir {shlex.quote(str(data))}"


def need_running(data: Path) -> Daemon:
    """Return the running daemon. Raises CliError(NOT_RUNNING)."""
    found = find_daemon(data)
    if not found.running:
        raise CliError(NOT_RUNNING, f"no daemon runs on {data}", start_command(data))
    return found

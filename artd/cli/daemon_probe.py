"""Is there a daemon on this data folder, who is it, and where does the folder lie?

Owner of: no state. Invariants: reads files and asks the kernel (flock, /proc) only, never the daemon, so that it works
and tells the truth when the daemon hangs or is gone.
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
    """state: starting, ready, draining or stopped; file: what the (last) daemon told of itself."""

    state: str
    file: paths.DaemonFile | None

    @property
    def running(self) -> bool:
        return self.state != "stopped"


def daemon(data: Path) -> Daemon:
    """The daemon that holds the lock, or the last one that did."""
    lock = paths.read_daemon_file(data, paths.LOCK)
    told = paths.read_daemon_file(data)
    if held(data):
        if lock is not None and told is not None and (told.pid, told.ticks) == (lock.pid, lock.ticks):
            return Daemon(told.state, told)
        return Daemon("starting", lock)
    return Daemon("stopped", lock or told)


def data_dir(args: argparse.Namespace) -> Path:
    """flag > $ARTD_DATA_DIR > artd.toml > default. Raises CliError(USAGE) on an artd.toml that cannot be used."""
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
    return f"artd start --detach{option(data)}"


def option(data: Path) -> str:
    """` --data-dir DATA` where it is needed to reach this folder again."""
    return "" if data == paths.data_dir() else f" --data-dir {shlex.quote(str(data))}"


def need_running(data: Path) -> Daemon:
    """The running daemon. Raises CliError(NOT_RUNNING)."""
    found = daemon(data)
    if not found.running:
        raise CliError(NOT_RUNNING, f"no daemon runs on {data}", start_command(data))
    return found

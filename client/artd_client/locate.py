"""Finds where the daemon of a data folder listens. A daemon that is dead or still starting has no address."""

from __future__ import annotations

import shlex
from pathlib import Path

from artd_schema import paths

from .errors import DaemonNotRunning
from .remote import Remote


class Starting(DaemonNotRunning):
    """The daemon's process is alive but does not listen yet."""


def start_command(data: Path) -> str:
    """Return the command that starts a daemon on `data`."""
    return "artd start --detach" + ("" if data == paths.data_dir() else f" --data-dir {shlex.quote(str(data))}")


def not_running(data: Path | Remote, what: str) -> DaemonNotRunning:
    """Return the error for a missing daemon. `what`: such as `no daemon runs`."""
    if isinstance(data, Remote):
        return DaemonNotRunning(
            f"{what} at {data.endpoint}, or its public key is not the one given", "artd start --detach"
        )
    command = start_command(data)
    return DaemonNotRunning(f"{what} on {data}; start it with `{command}`", command)


def endpoint(data: Path | Remote) -> str:
    """Return the ZeroMQ endpoint of the daemon on `data`. Raises DaemonNotRunning, or Starting when waiting may help."""
    if isinstance(data, Remote):
        return data.endpoint
    told = paths.read_daemon_file(data)
    if told is None or not told.alive():
        raise not_running(data, "no daemon runs")
    if not told.socket:
        raise Starting(
            f"the daemon on {data} (pid {told.pid}) is {told.state} and does not listen yet; see `artctl status`",
            start_command(data),
        )
    return told.socket

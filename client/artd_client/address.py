"""Finds where a daemon listens: the one of a data folder, or one on another machine by its endpoint and public key.

A daemon that is dead or still starting has no address. To another machine nothing is sent before both sides have proven their keys
(CURVE, ZeroMQ RFC 26).
"""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import zmq
import zmq.auth

from artd_schema import paths

from .errors import DaemonNotRunning, Invalid


@dataclass(frozen=True)
class Remote:
    """A daemon on another machine.

    `endpoint`: such as `tcp://trainer-1:7440` (`remote.bind` there). `server_key`: the output of `artctl key server` there.
    `key_file`: the file that `artctl key add` made for this client.
    """

    endpoint: str
    server_key: str
    key_file: str | os.PathLike[str]

    def secure(self, socket: zmq.Socket[bytes]) -> None:
        """Make this socket speak CURVE. Raises Invalid."""
        public, secret = self._pair()
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.server_key.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        except zmq.ZMQError:
            raise Invalid("server_key or the keys in key_file are no CURVE keys (40 characters)", "remote") from None

    def _pair(self) -> tuple[bytes, bytes]:
        try:
            public, secret = zmq.auth.load_certificate(self.key_file)
        except (OSError, ValueError, IndexError) as error:
            raise Invalid(f"key_file: {error}", "remote.key_file") from None
        if secret is None:
            raise Invalid(f"key_file: {self.key_file} holds a public key only", "remote.key_file")
        return public, secret


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

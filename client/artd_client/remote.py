"""Describes a daemon on another machine: its TCP endpoint, its public key, and the keys that this client shows.

Nothing is sent before both sides have proven their keys (CURVE, ZeroMQ RFC 26).
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import zmq
import zmq.auth

from .errors import Invalid


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

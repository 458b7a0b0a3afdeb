"""Manages CURVE keys: the daemon's own pair, and the public keys of clients on other machines that may connect.

Owns `DATA/keys`: `server.key_secret` and `clients/NAME.key`, in ZeroMQ's certificate format. A secret has mode 0600
from its first byte on. artd never stores a client's secret here. Every change is durable before its command reports it,
and applies to the next connection at once (nothing is cached).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from artd.store import fs
from artd_schema.paths import KEYS

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
CERTIFICATE = (
    '#   ZeroMQ CURVE **{what}** Certificate\nmetadata\n    artd = "{name}"\ncurve\n    public-key = "{public}"\n'
)


class BadKey(Exception):
    """A key cannot be read, added or removed; the text says why, and what to do."""


class NoKey(BadKey):
    """No key has this name."""


class Keys:
    """The keys of one data folder. Keys are Z85 text, 40 characters."""

    def __init__(self, data: Path) -> None:
        self._server = data / KEYS / "server.key_secret"
        self._clients = data / KEYS / "clients"

    def server(self) -> tuple[str, str]:
        """Return the daemon's (public, secret) key; generate it at the first call."""
        if not self._server.exists():
            fs.make_dir(self._server.parent)
            _write(self._server, "server", *_generate_pair())
        return read_pair(self._server)

    def allowed(self, public: bytes) -> bool:
        """Return whether a client with this public key may connect. A damaged file allows nobody and affects no other key.

        Raises OSError like `name`.
        """
        return bool(self.name(public))

    def name(self, public: bytes) -> str:
        """Return the name under which a public key is allowed, "" if it is not allowed.

        Raises OSError when a file could not be read and no other one holds the key.
        """
        failed: OSError | None = None
        for path in self._files():
            try:
                with contextlib.suppress(BadKey):
                    if _load(path)[0] == public:
                        return path.stem
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
        return ""

    def is_removed(self, name: str) -> bool:
        """Return whether certainly no key of this name exists."""
        try:
            (self._clients / f"{name}.key").stat()
        except OSError as error:
            return error.errno == errno.ENOENT
        return False

    def clients(self) -> dict[str, str]:
        """Return the public keys by name. Raises BadKey, OSError."""
        return {path.stem: _load(path)[0].decode() for path in self._files()}

    def _names(self) -> set[str]:
        return {path.stem for path in self._files()}

    def _files(self) -> list[Path]:
        """List the files of client keys. Raises OSError, which `Path.glob` would hide."""
        try:
            return sorted(self._clients / name for name in os.listdir(self._clients) if name.endswith(".key"))
        except FileNotFoundError:
            return []

    def create(self, name: str, out: Path) -> None:
        """Generate a pair, write both halves to the client's file `out`, and allow the public half. Raises BadKey, OSError."""
        self._check_new(name)
        if out.exists():
            raise BadKey(f"{out} exists: name another file with --out, or remove it")
        public, secret = _generate_pair()
        _write(out, name, public, secret)
        self._allow(name, public)

    def allow(self, name: str, public: str) -> None:
        """Allow a public key whose secret only its owner knows. Raises BadKey."""
        self._check_new(name)
        if not _is_key(public):
            raise BadKey(f"invalid public CURVE key {public!r}: use 40 characters of Z85")
        self._allow(name, public)

    def remove(self, name: str) -> None:
        """Remove a key, so that no new connection can use it. Raises NoKey."""
        if name not in self._names():
            raise NoKey(f"there is no key {name!r}")
        (self._clients / f"{name}.key").unlink()
        fs.fsync_dir(self._clients)

    def _check_new(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise BadKey(
                f"invalid key name {name!r}: use 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit"
            )
        if name in self._names():
            raise BadKey(f"a key {name!r} exists already: use another name, or `artctl key remove {name}`")

    def _allow(self, name: str, public: str) -> None:
        fs.make_dir(self._clients)
        _write(self._clients / f"{name}.key", name, public)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Return the (public, secret or None) key in a file. Raises BadKey for a missing or damaged file, OSError if it could not
    be read."""
    try:
        path.stat()  # pyzmq reports any failure of stat as a missing file
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        raise BadKey(f"{path} holds no key: {error}") from None


def read_pair(path: Path) -> tuple[str, str]:
    """Return the (public, secret) key in a certificate file. Raises BadKey, OSError."""
    public, secret = _load(path)
    if secret is None:
        raise BadKey(f"{path} holds a public key only: use the file that `artctl key add --out` wrote")
    return public.decode(), secret.decode()


def _generate_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _is_key(text: str) -> bool:
    try:
        return len(z85.decode(text)) == 32
    except (KeyError, ValueError):
        return False


def _write(path: Path, name: str, public: str, secret: str = "") -> None:
    text = CERTIFICATE.format(what="Secret" if secret else "Public", name=name, public=public)
    fs.write_file(path, (text + (f'    secret-key = "{secret}"\n' if secret else "")).encode())

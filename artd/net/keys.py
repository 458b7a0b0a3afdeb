"""CURVE keys: the daemon's own pair, and the clients of other machines that may connect.

Owner of: `DATA/keys`: `server.key_secret` and `clients/NAME.key`, in ZeroMQ's certificate format. Invariants: a secret is
0600 from its first byte on; a client's secret is never kept here; every change is durable before it is told, and counts
for the next connection at once (nothing is cached).
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
    """A key that cannot be added or removed: the text says why, and what to do."""


class NoKey(BadKey):
    """There is none of this name."""


class Keys:
    """The keys of one data folder. Keys are Z85 text, 40 characters."""

    def __init__(self, data: Path) -> None:
        self._server = data / KEYS / "server.key_secret"
        self._clients = data / KEYS / "clients"

    def server(self) -> tuple[str, str]:
        """(public, secret) of the daemon; made at the first call."""
        if not self._server.exists():
            fs.make_dir(self._server.parent)
            _write(self._server, "server", *_pair())
        return read_pair(self._server)

    def allowed(self, public: bytes) -> bool:
        """Whether a client with this public key may connect. A damaged file allows nobody, and keeps nobody else out.
        Errors: OSError, see `name`."""
        return bool(self.name(public))

    def name(self, public: bytes) -> str:
        """The name under which a public key is allowed, "" when it is not. Errors: OSError when a file could not be read and
        no other one holds the key."""
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
        """Whether it is certain that there is no key of this name."""
        try:
            (self._clients / f"{name}.key").stat()
        except OSError as error:
            return error.errno == errno.ENOENT
        return False

    def clients(self) -> dict[str, str]:
        """Public keys by name. Errors: BadKey, OSError."""
        return {path.stem: _load(path)[0].decode() for path in self._files()}

    def _names(self) -> set[str]:
        return {path.stem for path in self._files()}

    def _files(self) -> list[Path]:
        """Errors: OSError, which `Path.glob` would pass over."""
        try:
            return sorted(self._clients / name for name in os.listdir(self._clients) if name.endswith(".key"))
        except FileNotFoundError:
            return []

    def create(self, name: str, out: Path) -> None:
        """A new pair: its public half is allowed here, the client's file `out` holds both. Errors: BadKey, OSError."""
        self._check_new(name)
        if out.exists():
            raise BadKey(f"{out} exists: give another --out, or remove it")
        public, secret = _pair()
        _write(out, name, public, secret)
        self._allow(name, public)

    def allow(self, name: str, public: str) -> None:
        """Allow a key whose secret only its owner knows. Errors: BadKey."""
        self._check_new(name)
        if not _is_key(public):
            raise BadKey(f"{public!r} is no public CURVE key: 40 characters of Z85 are")
        self._allow(name, public)

    def remove(self, name: str) -> None:
        """No new connection with this key. Errors: NoKey."""
        if name not in self._names():
            raise NoKey(f"there is no key {name!r}")
        (self._clients / f"{name}.key").unlink()
        fs.fsync_dir(self._clients)

    def _check_new(self, name: str) -> None:
        if not NAME.fullmatch(name):
            raise BadKey(f"key name {name!r}: 1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
        if name in self._names():
            raise BadKey(f"there is a key {name!r} already; `artctl key remove {name}` takes it back")

    def _allow(self, name: str, public: str) -> None:
        fs.make_dir(self._clients)
        _write(self._clients / f"{name}.key", name, public)


def _load(path: Path) -> tuple[bytes, bytes | None]:
    """Errors: BadKey for a file that is missing or damaged, OSError for one that could not be read."""
    try:
        path.stat()  # pyzmq takes every failure of it for a missing file
        return zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        if isinstance(error, OSError) and error.errno not in (None, errno.ENOENT):
            raise
        raise BadKey(f"{path} holds no key: {error}") from None


def read_pair(path: Path) -> tuple[str, str]:
    """(public, secret) of a certificate file. Errors: BadKey, OSError."""
    public, secret = _load(path)
    if secret is None:
        raise BadKey(f"{path} holds a public key only")
    return public.decode(), secret.decode()


def _pair() -> tuple[str, str]:
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

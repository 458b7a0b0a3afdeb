"""Says where a daemon lives on disk: data folder, runtime folder, the names of the files in both, and `daemon.json`.

Daemon, command line, client and tests all ask here. Standard library only. A runtime folder belongs to its user alone
(mode 0700), and `runtime_dir` creates it. A socket path fits in 107 bytes.
"""

from __future__ import annotations

import json
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path

DATABASE = "artd.db"
LOCK = "artd.lock"
MARKER = "artd.folder"
DAEMON_JSON = "daemon.json"
LOGS = "logs"
KEYS = "keys"
CLIENT_SOCKET = "client.sock"
WORKER_SOCKET = "worker.sock"
SOCKET_BYTES = 107
_ROOM = 40  # bytes kept for the names below the runtime folder


class UnsafeDir(OSError):
    """A runtime folder that artd cannot use: wrong owner, wrong mode, not a folder, or too long a name."""


def data_home() -> Path:
    """Return `$XDG_DATA_HOME` if it is absolute, else `~/.local/share`."""
    configured = os.environ.get("XDG_DATA_HOME", "")
    return Path(configured) if configured.startswith("/") else Path.home() / ".local" / "share"


def default_data_dir() -> Path:
    """Return the default data folder, `$XDG_DATA_HOME/artd/data`; runtimes are beside it."""
    return data_home() / "artd" / "data"


def data_dir(given: str | os.PathLike[str] | None = None) -> Path:
    """Return the data folder: `given`, else `$ARTD_DATA_DIR`, else the default. It is absolute, but links are not resolved."""
    chosen = given or os.environ.get("ARTD_DATA_DIR") or default_data_dir()
    return Path(chosen).expanduser().absolute()


def runtime_dir(data: str | os.PathLike[str], create: bool = True) -> Path:
    """Return the folder for sockets of the daemon on this data folder; it has mode 0700 and belongs to this user. Raises
    UnsafeDir.

    It is `$XDG_RUNTIME_DIR/artd/<8 hex>`, else `/tmp/artd-<uid>/<8 hex>`; the hex digits are the sha256 of the data folder's
    real path.
    """
    import hashlib  # imported here, because it costs 5 ms, which `artctl status` saves

    name = hashlib.sha256(os.path.realpath(data).encode()).hexdigest()[:8]
    configured = os.environ.get("XDG_RUNTIME_DIR", "")
    usable = configured.startswith("/") and Path(configured).is_dir() and os.access(configured, os.W_OK)
    parent = Path(configured) / "artd" if usable else Path(f"/tmp/artd-{os.getuid()}")
    folder = parent / name
    if len(os.fsencode(folder)) + _ROOM > SOCKET_BYTES:
        raise UnsafeDir(
            f"{folder} is too long for sockets: {len(os.fsencode(folder))} bytes, {SOCKET_BYTES - _ROOM} allowed. "
            "Next: set XDG_RUNTIME_DIR to a shorter folder, or unset it"
        )
    if create:
        for part in (parent, folder):
            part.mkdir(mode=0o700, exist_ok=True)
            _check_private(part)
    return folder


def _check_private(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid():
        raise UnsafeDir(
            f"{folder} belongs to uid {found.st_uid}, not to {os.getuid()}. Next: set XDG_RUNTIME_DIR to a folder of your own (0700), for "
            "artd and for its clients"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise UnsafeDir(f"{folder} is not a folder. Next: remove it")
    if found.st_mode & 0o077:
        raise UnsafeDir(f"{folder} is open to others (mode {found.st_mode & 0o777:o}). Next: chmod 700 {folder}")


def socket_path(folder: Path, name: str) -> Path:
    """Return `folder/name`, checked to fit into a Unix socket's address. Raises UnsafeDir."""
    path = folder / name
    if len(os.fsencode(path)) > SOCKET_BYTES:
        raise UnsafeDir(f"{path} has {len(os.fsencode(path))} bytes; a socket path has {SOCKET_BYTES} at most")
    return path


# ---- who runs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class DaemonFile:
    """`daemon.json`, which the daemon replaces at each change of `state`. `artd.lock` has the same content without
    addresses.

    - `state`: starting, ready or draining.
    - `socket`: the ZeroMQ endpoint for clients (`ipc://…`).
    - `url`: the gateway's base URL.
    - `started`: milliseconds since the epoch.
    - `ticks`: start time of `pid`, in clock ticks since the machine's start.
    """

    pid: int
    ticks: int
    boot_id: str
    version: str
    state: str = "starting"
    socket: str = ""
    url: str = ""
    started: int = 0
    drain_s: float = 60.0

    def alive(self) -> bool:
        """Return whether this very process still runs, on the same boot of the machine."""
        return self.boot_id == boot_id() and self.ticks == process_ticks(self.pid)


def write_daemon_file(data: Path, content: DaemonFile) -> None:
    """Replace DATA/daemon.json, with mode 0600. It is not fsynced, because it is worth nothing after a power loss."""
    temporary = data / f"{DAEMON_JSON}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "w") as out:
        json.dump(asdict(content), out)
    temporary.replace(data / DAEMON_JSON)


def read_daemon_file(data: Path, name: str = DAEMON_JSON) -> DaemonFile | None:
    """Return what the last daemon on this data folder wrote, None when nothing can be read. That daemon may be dead."""
    try:
        content = json.loads((data / name).read_bytes())
        known = {f.name for f in fields(DaemonFile)}
        return DaemonFile(**{k: v for k, v in content.items() if k in known})
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, AttributeError):
        return None


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def process_ticks(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since the machine's start; None if it, or its last thread, has
    ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *rest = text[text.rindex(")") + 2 :].split()
    return None if state in "ZX" and int(rest[16]) <= 1 else int(rest[18])

"""Builds the environment of a managed child.

Owns the names of the tags. The daemon's own tags, secrets and Python settings never reach a child; credentials of
others reach it only if the settings keep them. Every child gets tags of its own, so that artd can find and attribute
every descendant (SPT_NOENV keeps setproctitle from blanking them).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import procfs

SECRETS = ("ARTD_TOKEN", "ARTD_API_KEY")
DROP = (
    "*_TOKEN", "*_API_KEY", "*_APIKEY", "*_ACCESS_KEY", "*_ACCESS_KEY_ID", "*_SECRET", "*_SECRET_*", "*_PASSWORD", "*_PASSWD",
    "*_CREDENTIALS", "*_PRIVATE_KEY", "AWS_*", "AZURE_*", "GOOGLE_APPLICATION_*", "SSH_AUTH_SOCK", "SSH_AGENT_PID",
)  # fmt: skip
"""Credentials that workers do not need: trainer and engine read local folders and talk only to the daemon."""
_PYTHON = (
    "PYTHONPATH",
    "PYTHONHOME",
    "PYTHONSTARTUP",
    "PYTHONEXECUTABLE",
    "PYTHONSAFEPATH",
    "PYTHONDONTWRITEBYTECODE",
    "PYTHONWARNINGS",
    "VIRTUAL_ENV",
    "__PYVENV_LAUNCHER__",
)
TRAINER_EXTRA = {"TOKENIZERS_PARALLELISM": "false"}
"""Variables for every trainer. The trainer itself sets those that depend on its device (`placement.prepare`)."""
_SERVICE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """The identity of a child. `socket` is the ipc endpoint of the daemon, `build` the digest of the children's code."""

    instance: str
    boot: int
    spawn: int
    worker: str
    build: str
    socket: str

    def variables(self) -> dict[str, str]:
        """Return the tags as environment variables. ARTD_OWNER is the daemon itself as PID:TICKS, so that anybody who finds the
        child can tell whether its owner lives."""
        me = procfs.identity()
        return {
            "ARTD_INSTANCE": self.instance,
            "ARTD_BOOT": str(self.boot),
            "ARTD_SPAWN": str(self.spawn),
            "ARTD_WORKER": self.worker,
            "ARTD_BUILD": self.build,
            "ARTD_SOCKET": self.socket,
            "ARTD_OWNER": f"{me.pid}:{me.ticks}",
        }


def filter_environment(base: Mapping[str, str], drop: Sequence[str] = DROP, keep: Sequence[str] = ()) -> dict[str, str]:
    """Return the part of the daemon's environment that a process in another interpreter may have.

    `drop` and `keep` are names or patterns with `*`. `keep` overrides `drop`, but never lets artd's own secrets through.
    """
    dropped = {*SECRETS, *_PYTHON, *_SERVICE}
    return {key: value for key, value in base.items() if key not in dropped and (_is(key, keep) or not _is(key, drop))}


def _is(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def child_environment(
    base: Mapping[str, str],
    tags: Tags,
    *,
    code: Path,
    tmpdir: Path,
    site_paths: Sequence[str] = (),
    extra: Mapping[str, str] | None = None,
    drop: Sequence[str] = DROP,
    keep: Sequence[str] = (),
) -> dict[str, str]:
    """Return the environment of one spawn.

    `base` is the daemon's own environment; see `filter_environment` for `drop` and `keep`. `code` is the folder that holds
    artd_schema and artd_workers; PYTHONPATH has it first and `site_paths` after it. `extra` holds further variables for this kind
    of worker. Raises ValueError when `extra` would change a tag, because reaping and fencing rest on the tags.
    """
    fixed = tags.variables()
    added = dict(extra or {})
    if clash := sorted(added.keys() & (fixed.keys() | set(SECRETS))):
        raise ValueError(f"environment of worker {tags.worker!r}: artd itself sets {', '.join(clash)}; leave it out")
    return {
        **filter_environment(base, drop, keep),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **added,
        **fixed,
        "SPT_NOENV": "1",
        "PYTHONPATH": ":".join([str(code), *site_paths]),
        "TMPDIR": str(tmpdir),
    }

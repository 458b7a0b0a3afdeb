"""The environment of a managed child.

Owner of: the names of the tags. Invariants: the daemon's own tags, secrets and Python settings never reach a child, nor do credentials of others unless told; the
tags do, so that every descendant can be found and attributed (SPT_NOENV keeps setproctitle from blanking them).
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
"""Credentials that workers have no use for: trainer and engine read local folders and speak to the daemon alone."""
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
"""What a trainer needs besides, wherever one is started. What hangs on its device it sets itself (`placement.prepare`)."""
_SERVICE = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


@dataclass(frozen=True, kw_only=True)
class Tags:
    """Who a child is. socket: ipc endpoint of the daemon; build: digest of the children's code."""

    instance: str
    boot: int
    spawn: int
    worker: str
    build: str
    socket: str

    def variables(self) -> dict[str, str]:
        """ARTD_OWNER is the daemon itself as PID:TICKS: whoever finds the child can tell whether its owner lives."""
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


def inherited(base: Mapping[str, str], drop: Sequence[str] = DROP, keep: Sequence[str] = ()) -> dict[str, str]:
    """What a process in another interpreter may have of the daemon's own environment. drop, keep: names or patterns with `*`; what
    `keep` names stays, but for artd's own secrets."""
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
    """Environment of one spawn. base: the daemon's own; drop, keep: see `inherited`; code: folder that holds artd_schema and artd_workers;
    site_paths: further folders for PYTHONPATH, after `code`; extra: what this kind of worker needs besides.

    Raises ValueError when `extra` would change a tag: reaping and fencing rest on them.
    """
    fixed = tags.variables()
    added = dict(extra or {})
    if clash := sorted(added.keys() & (fixed.keys() | set(SECRETS))):
        raise ValueError(f"environment of worker {tags.worker!r}: {', '.join(clash)} is set by artd; leave it out")
    return {
        **inherited(base, drop, keep),
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

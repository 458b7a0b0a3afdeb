"""Decides whether a folder is artd's own, free to take, or somebody else's.

Owns DATA/artd.folder, the marker of a folder that artd has taken. artd changes nothing in a folder that it refuses, not
even the mode. The marker is durable before anything else is made. artd refuses a folder without a database as long as
anything in it shows that there was one. `lost+found` counts as nothing, because a fresh volume has it.
"""

from __future__ import annotations

import errno
import os
import shlex
from pathlib import Path

from artd.store import fs
from artd.store.migrate import APPLICATION_ID
from artd_schema.paths import DATABASE, MARKER

IGNORED = frozenset({"lost+found"})
RESTORING = f".{DATABASE}.restoring"
REMAINS = ("blobs/*/*", "checkpoints/*/*", "artd-schema-*.db", "gateway.json")
"""Files that show that there was a database."""
RENAMED = ("tmp", "blobs", "checkpoints")
"""Folders between which artd renames files."""
_MAGIC = b"SQLite format 3\0"
_HEADER = 100
_NAMED = 3
_NOTHING = ".artd-no-such-file"


class Refused(Exception):
    """artd does not use this folder. `next` is the command or action that helps."""

    def __init__(self, message: str, next: str) -> None:
        super().__init__(message)
        self.next = next

    def line(self) -> str:
        return f"{self}. Next: {self.next}"


def names(folder: Path) -> list[str]:
    """Return the sorted names in a folder, without `lost+found`."""
    return sorted(set(os.listdir(folder)) - IGNORED)


def is_free(folder: Path) -> bool:
    """Return whether a folder is empty or does not exist."""
    return not folder.exists() or (folder.is_dir() and not names(folder))


def take(root: Path) -> None:
    """Make sure that `root` is artd's: it holds artd's database or marker, or it is empty or absent and artd takes it now.

    Raises Refused, OSError; the folder is unchanged then.
    """
    if not is_free(root):
        _require_ours(root)
        _require_one_disk(root)
        return
    if root.exists() and os.geteuid() not in (0, root.stat().st_uid):
        raise Refused(f"{root} belongs to another user", "name a folder of your own: artd start --data-dir NEW")
    fs.make_dir(root)
    fs.write_new(root / MARKER, b"{}")
    root.chmod(0o700)


def require_database(root: Path) -> None:
    """Check that `root` has artd's database. Raises Refused when it is no data folder of artd, or its database is gone."""
    if database(root) != "artd":
        _require_ours(root)


def database(root: Path) -> str:
    """Return what `root/artd.db` is by its first bytes: `artd` (artd's own), `new` (without a schema), `none` (missing or
    empty) or `other`."""
    try:
        with (root / DATABASE).open("rb") as file:
            header = file.read(_HEADER)
    except FileNotFoundError:
        return "none"
    if not header:
        return "none"
    if len(header) < _HEADER or not header.startswith(_MAGIC):
        return "other"
    application = int.from_bytes(header[68:72], "big")
    return {APPLICATION_ID: "artd", 0: "new"}.get(application, "other")


def _require_ours(root: Path) -> None:
    """Check that the folder is artd's. It reads the database last, because another start may be making it. Raises Refused."""
    found = names(root)
    remains = _remains(root)
    taken = (root / MARKER).exists()
    kind = database(root)
    if kind == "artd" or (kind == "new" and taken and _holds_bytes(root / f"{DATABASE}-wal")):
        return
    if (root / RESTORING).exists():
        raise Refused(
            f"{root} holds a restore that did not finish",
            f"remove it, then artd restore BACKUP --data-dir {shlex.quote(str(root))}",
        )
    if taken or _was_ours(root):
        if kind == "other":
            raise Refused(f"{root / DATABASE} is damaged: its first bytes are not those of artd's database",
                          "artd restore BACKUP --data-dir NEW")  # fmt: skip
        if remains:
            raise Refused(
                f"{root} has no database ({DATABASE} is missing or empty), but it holds {remains}",
                "artd restore BACKUP --data-dir NEW; or move the folder away to begin anew",
            )
        if taken:
            return
    listing = ", ".join(found[:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    raise Refused(
        f"{root} holds files that are not artd's ({listing}), so artd leaves it alone",
        "name a folder that is empty or does not exist: --data-dir NEW",
    )


def _was_ours(root: Path) -> bool:
    """Return whether a folder without a marker looks like a data folder without its database."""
    return (root / "artd.lock").exists() and (root / "blobs").is_dir()


def _remains(root: Path) -> str:
    """Return the first file that shows that there was a database, relative to `root`, "" for none."""
    if database(root) == "none" and _holds_bytes(root / f"{DATABASE}-wal"):
        return f"{DATABASE}-wal"  # SQLite would delete it
    found = (next(root.glob(pattern), None) for pattern in REMAINS)
    return next((str(path.relative_to(root)) for path in found if path is not None), "")


def _holds_bytes(path: Path) -> bool:
    return path.exists() and path.stat().st_size > 0


def _require_one_disk(root: Path) -> None:
    """Check that the folders of `RENAMED` are on the file system of `root`. Raises Refused."""
    for name in RENAMED:
        try:  # the kernel compares the mounts before it looks for the file
            os.rename(root / _NOTHING, root / name / _NOTHING)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            raise Refused(
                f"{root / name} is on another file system than {root}, and artd renames files between the two",
                f"move the whole data folder to the larger disk, or put {name} back into {root}",
            ) from None

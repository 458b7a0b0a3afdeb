"""The code of a package's loss, as the job that is replayed was trained with it."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec
from msgspec import Struct

from artd.cli import read
from artd.cli.outcome import FAILED, NOT_FOUND, CliError
from artd.datadir.layout import DataDir
from artd.supervise.code import digest_files, install_files, read_tree
from artd.supervise.losses import installed_files
from artd_schema.codec import UNREADABLE, digest
from artd_schema.losses import LossCode
from artd_schema.manifest import MANIFEST_FILE


class _Manifest(Struct):
    """What is read of a checkpoint's manifest here. The trainer checks its sha256, before it imports a loss."""

    loss: LossCode | None = None


def committed_loss(data: Path, row: read.Row) -> LossCode | None:
    """Read a loss from the manifest of a job's checkpoint.

    Returns None where the loss is artd's own, or the manifest is damaged: the trainer will say so.
    """
    try:
        raw = (data / row["dir"] / MANIFEST_FILE).read_bytes()
        return msgspec.json.decode(raw, type=_Manifest).loss if digest(raw) == row["sha"] else None
    except (*UNREADABLE, OSError):
        return None


def copy_loss(data: Path, code: LossCode, scratch: Path) -> str:
    """Copy the loss's files to the scratch folder; returns the folder for PYTHONPATH.

    They are the daemon's copy, or else an installed package whose files are the same. Raises CliError.
    """
    source = Path(DataDir(data, data).code) / code.digest
    files = read_tree(source) if source.is_dir() else installed_files(code)
    named = f"loss {code.kind!r} of {code.distribution} {code.version}"
    if files is None:
        raise CliError(
            NOT_FOUND, f"{named}: its copy {source} is gone, and no package with the same files is installed",
            f"pip install {code.distribution}=={code.version}",
        )  # fmt: skip
    if (found := digest_files(files)) != code.digest:
        raise CliError(
            FAILED, f"{named}: {source} is damaged: its files have the digest {found}",
            f"rm -r {shlex.quote(str(source))}; pip install {code.distribution}=={code.version}",
        )  # fmt: skip
    return str(install_files(scratch, files))

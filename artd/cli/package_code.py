"""The packages' code that a committed checkpoint was made with, for a command that computes with it again."""

from __future__ import annotations

import shlex
from pathlib import Path

import msgspec

from artd.datadir.layout import DataDir
from artd.supervise.code import install_files
from artd.supervise.packages import installed_files
from artd_schema.codec import UNREADABLE, digest
from artd_schema.data.manifest import MANIFEST_FILE
from artd_schema.packages import PackageCode, RunCode, digest_files, read_tree

from . import read
from .outcome import FAILED, NOT_FOUND, CliError


def committed_code(data: Path, row: read.Row) -> RunCode:
    """Read a checkpoint's code from its manifest. `row` has `dir` and `sha`. A damaged manifest names no code; the
    reader of the checkpoint reports the damage."""
    try:
        raw = (data / row["dir"] / MANIFEST_FILE).read_bytes()
        return msgspec.json.decode(raw, type=RunCode) if digest(raw) == row["sha"] else RunCode()
    except (*UNREADABLE, OSError):
        return RunCode()


def copy_code(data: Path, code: PackageCode, scratch: Path) -> str:
    """Copy a package's files to the scratch folder; returns the folder for PYTHONPATH.

    They are the daemon's copy, or else an installed package whose files are the same. Raises CliError.
    """
    source = Path(DataDir(data, data).code) / code.digest
    files = read_tree(source) if source.is_dir() else installed_files(code)
    named = f"{code.kind!r} of {code.distribution} {code.version}"
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

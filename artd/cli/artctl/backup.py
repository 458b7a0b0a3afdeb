"""`artctl backup DIR`: makes a complete, checked copy of the data folder, with the daemon up or down.

Afterwards DIR is a complete backup, or empty. The data folder is only read, and the daemon is not asked. Exit codes: 0, 1
failed (the data is damaged, or the disk is full), 3 no daemon ever ran there, 6 DIR is not empty or is inside the data folder.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from artd.cli import daemon_probe, show
from artd.cli.outcome import CONFLICT, FAILED, NOT_RUNNING, OK, CliError, shared_options
from artd.cli.status import problems
from artd_schema.paths import DATABASE

if TYPE_CHECKING:
    from artd.backups.backup import BackupResult


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "backup", help="copy the data folder, whole and checked, while artd runs", parents=[shared_options()]
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="an empty folder, or one that does not exist yet")
    parser.add_argument(
        "--copy", action="store_true", help="copy every file, even where DIR is on the same disk and could share them"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data, target = daemon_probe.data_dir(args), args.dir.absolute()
    if not (data / DATABASE).is_file():
        raise CliError(
            NOT_RUNNING, f"there is no database {data / DATABASE}: no daemon has run on {data} yet",
            daemon_probe.start_command(data),
        )  # fmt: skip
    made = _make(data, target, link=not args.copy)
    if args.json:
        info = {key: value for key, value in _plain(made).items() if key not in ("version", "created")}
        content = {"backup": str(target)} | show.stamp_times({"created": made.info.created}) | info
        show.document("backup", data, **content, **asdict(made.fetched))
    else:
        _tell(target, made)
    return OK


def _make(data: Path, target: Path, link: bool) -> BackupResult:
    """Make the backup. Raises CliError."""
    from artd.backups.backup import BackupError, NotEmpty, backup
    from artd.store.migrate import SchemaMismatch

    try:
        return backup(data, target, show.now_ms(), link=link)
    except NotEmpty as error:
        raise CliError(CONFLICT, str(error)) from None
    except (BackupError, SchemaMismatch) as error:
        raise CliError(FAILED, str(error)) from None
    except sqlite3.Error as error:
        raise CliError(
            FAILED, f"{data} cannot be copied to {target}: {error}", problems.next_for_database(error)
        ) from None
    except OSError as error:
        then = "free space, or another folder"
        raise CliError(FAILED, f"the backup to {target} failed: {error}", then) from None


def _plain(made: BackupResult) -> show.Row:
    import msgspec

    return dict(msgspec.to_builtins(made.info))


def _tell(target: Path, made: BackupResult) -> None:
    info, fetched = made.info, made.fetched
    print(target)
    runs = ", ".join(f"{run.name}@{run.step}" if run.step >= 0 else run.name for run in info.runs) or "no run"
    files = f"{info.checkpoints} checkpoints, {info.blobs} blobs"
    how = f"{fetched.linked} files shared with the data folder, {fetched.copied} copied ({show.size(fetched.copied_bytes)})"
    print(f"{runs}: database {show.size(info.database_bytes)}, {files}; {how}; checked", file=sys.stderr)
    if fetched.linked:
        print(
            "its files are on the data folder's disk: --copy, or a folder on another disk, outlives that",
            file=sys.stderr,
        )

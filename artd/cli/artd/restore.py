"""`artd restore BACKUP --data-dir NEW`: makes a data folder from a backup; `artd start` continues from there.

Afterwards NEW is complete, or empty. The backup is only read. Exit codes: 0, 1 the backup is damaged or the restore failed, 5
no such backup, 6 NEW is not empty, or a daemon runs there.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from artd.cli import daemon_probe, show
from artd.cli.outcome import CONFLICT, FAILED, NOT_FOUND, OK, CliError, shared_options

if TYPE_CHECKING:
    from artd.backups.restore import RestoreResult


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "restore", help="make a new data folder (--data-dir) from a backup", parents=[shared_options()]
    )
    parser.add_argument("backup", metavar="BACKUP", type=Path, help="what `artctl backup` wrote")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data, source = daemon_probe.data_dir(args), args.backup.absolute()
    if not source.is_dir():
        raise CliError(NOT_FOUND, f"there is no backup {source}", "give the folder that `artctl backup` wrote")
    made = _make(source, data)
    runs = [{"name": run.name, "state": run.state, "step": run.step} for run in made.info.runs]
    if args.json:
        content = show.stamp_times({"created": made.info.created})
        content |= {"backup": str(source), "instance": made.instance, "original": made.info.instance, "leap": made.leap}
        show.print_document("artd.restore/1", data, content | {"runs": runs})
        return OK
    print(data)
    steps = ", ".join(f"{run['name']}@{run['step']}" for run in runs) or "no run"
    print(f"{steps}, as of {show.ago(made.info.created)}; a new instance: {made.instance[:8]}", file=sys.stderr)
    print(f"next: {daemon_probe.start_command(data)}", file=sys.stderr)
    return OK


def _make(source: Path, data: Path) -> RestoreResult:
    """Make the data folder. Raises CliError."""
    from artd.backups.backup import BackupError, NotEmpty
    from artd.backups.restore import restore
    from artd.datadir.lock import Owned
    from artd.store.migrate import SchemaMismatch

    try:
        return restore(source, data, show.now_ms())
    except (NotEmpty, Owned) as error:
        raise CliError(CONFLICT, str(error)) from None
    except (BackupError, SchemaMismatch) as error:
        raise CliError(FAILED, str(error)) from None
    except (OSError, sqlite3.Error) as error:
        raise CliError(FAILED, f"the restore to {data} failed: {error}", "free space, or another --data-dir") from None

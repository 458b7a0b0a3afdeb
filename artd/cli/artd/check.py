"""`artd check [--deep]`: checks every invariant of the database and of the files beside it.

The data folder is only read. Without a daemon its lock is held, shared, so that no daemon starts meanwhile. Beside a running
daemon the rows of one snapshot are checked, and what retention deletes meanwhile is not a violation. Exit codes: 0 clean, 1
violations (or the folder cannot be read), 3 no daemon ever ran there.
"""

from __future__ import annotations

import argparse
import sqlite3
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from artd.cli import daemon_probe, show
from artd.cli.outcome import FAILED, NOT_RUNNING, OK, CliError, shared_options
from artd.cli.status import problems
from artd.datadir.lock import reading
from artd_schema.paths import DATABASE

if TYPE_CHECKING:
    from artd.check.report import Report

SHOWN = 10


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "check", help="check every invariant of the data folder, read-only", parents=[shared_options()]
    )
    parser.add_argument("--deep", action="store_true", help="hash every file and body too, and compare every index")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    with reading(data) as alone:
        report = check_folder(data, args.deep, live=not alone)
    if args.json:
        _document(data, report, alone)
    else:
        _tell(data, report, alone)
    return OK if report.clean else FAILED


def check_folder(data: Path, deep: bool, live: bool = False) -> Report:
    """Check a data folder. Raises CliError: NOT_RUNNING when there is no database, FAILED when another version of artd made it."""
    from artd.check.run import check
    from artd.store.migrate import SchemaMismatch

    if not (data / DATABASE).is_file():
        raise CliError(
            NOT_RUNNING, f"there is no database {data / DATABASE}: no daemon has run on {data} yet",
            daemon_probe.start_command(data),
        )  # fmt: skip
    try:
        return check(data, deep=deep, live=live)
    except SchemaMismatch as error:
        raise CliError(FAILED, f"{data}: {error}") from None
    except (sqlite3.DatabaseError, OSError) as error:
        raise CliError(FAILED, f"{data} cannot be read: {error}", problems.next_for_database(error)) from None


def _document(data: Path, report: Report, alone: bool) -> None:
    checks = [
        {"name": o.name, "promise": o.promise, "count": o.count, "violations": [asdict(v) for v in o.violations]}
        for o in report.outcomes
    ]
    content = {
        "clean": report.clean,
        "deep": report.deep,
        "live": not alone,
        "seconds": report.seconds,
        "checks": checks,
    }
    show.print_document("artd.check/1", data, content | {"notes": [asdict(note) for note in report.notes]})


def _tell(data: Path, report: Report, alone: bool) -> None:
    for outcome in report.broken:
        print(f"{show.paint('BROKEN', 'red')}  {outcome.name}: {outcome.promise}; but")
        for violation in outcome.violations[:SHOWN]:
            print(f"        {violation.what}: {violation.text}")
        if outcome.count > SHOWN:
            print(f"        ... {outcome.count} in all (--json has the first hundred)")
    for note in report.notes:
        print(f"{show.paint('note', 'dim')}    {note.count} {note.name}: {note.text} ({', '.join(note.names)})")
    spent = ", ".join(f"{part} {seconds:.1f} s" for part, seconds in report.seconds.items())
    depth = "deep" if report.deep else "not deep: --deep hashes every file too"
    beside = "" if alone else ", beside a running daemon"
    verdict = "clean" if report.clean else f"{len(report.broken)} BROKEN"
    print(f"{data}: {len(report.outcomes)} checks, {verdict} ({depth}{beside}; {spent})")
    if not report.clean:
        print("next: docs/operations.md, `A check that is not clean`", file=sys.stderr)

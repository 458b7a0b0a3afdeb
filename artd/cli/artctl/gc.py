"""`artctl gc [--dry-run] [--resume]`: deletes now what the daemon would delete at its next pass.

A running daemon does it; without one it happens here, under the daemon's lock. Exit codes: 0, 1 failed, 3 no daemon ever ran
there, 6 another process uses the folder or it is not artd's, 7 the daemon did not answer in time.
"""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from artd import __version__
from artd.cli import daemon_probe, show
from artd.cli.outcome import CONFLICT, FAILED, NOT_RUNNING, OK, USAGE, CliError, complain, shared_options
from artd.cli.status import problems
from artd_schema.paths import DATABASE

from .act import WAIT, open_client

if TYPE_CHECKING:
    from artd.config import Retention

TIMEOUT_S = 600.0
WORDS = {
    "expired": "expired",
    "trashed": "unused files moved to the trash",
    "freed": "files deleted from the trash",
}


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "gc", help="delete what has expired and files that nothing uses", parents=[shared_options()]
    )
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    parser.add_argument("--resume", action="store_true", help="the clock is right: delete by age again")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help=WAIT)
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    if not (data / DATABASE).is_file():
        raise CliError(
            NOT_RUNNING, f"there is no database {data / DATABASE}: no daemon has run on {data} yet",
            daemon_probe.start_command(data),
        )  # fmt: skip
    if daemon_probe.find_daemon(data).running:
        with open_client(data, args.timeout) as art:
            done = art.collect(args.dry_run, args.resume)
        rows, stopped = done.rows, done.stopped
    else:
        rows, stopped = _collect_without_daemon(data, args)
    if args.json:
        show.document("gc", data, dry=args.dry_run, stopped=stopped, rows=rows)
    else:
        _tell(data, args.dry_run, rows, stopped)
    return OK


def _collect_without_daemon(data: Path, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """Collect without a daemon, under its lock. Raises CliError."""
    import sqlite3

    from artd import config
    from artd.datadir import folder, lock
    from artd.store.migrate import SchemaMismatch
    from artd.store.origin import ForeignLog
    from artd.store.store import DatabaseInUse

    try:
        retention = config.load(getattr(args, "config", None), str(data)).retention
        folder.require_database(data)
        held = lock.acquire(data, __version__, 0.0)
    except config.ConfigError as error:
        raise CliError(USAGE, str(error)) from None
    except folder.Refused as error:
        raise CliError(CONFLICT, str(error), error.next) from None
    except lock.Owned as error:
        raise CliError(CONFLICT, str(error)) from None
    except OSError as error:
        raise CliError(FAILED, f"{data} cannot be written: {error}", problems.next_for_database(error)) from None
    try:
        return _collect(data, retention, args)
    except (SchemaMismatch, ForeignLog, DatabaseInUse) as error:
        raise CliError(FAILED, f"{data}: {error}") from None
    except (sqlite3.Error, OSError) as error:
        raise CliError(FAILED, f"{data}: {error}", problems.next_for_database(error)) from None
    finally:
        held.close()


def _collect(data: Path, retention: Retention, args: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    import asyncio

    from artd.clock import Clock
    from artd.datadir.layout import DataDir
    from artd.retention import clock_jumps
    from artd.retention.collector import Collector
    from artd.store.blobs import Blobs
    from artd.store.migrate import require_known
    from artd.store.readonly import open_readonly
    from artd.store.store import Store

    with closing(open_readonly(data / DATABASE)) as c:
        require_known(c)  # only the daemon migrates

    async def main() -> tuple[list[dict[str, Any]], str]:
        folder = DataDir(data, data)
        store = Store(folder.database, Clock(), _end_after_failed_commit)
        store.hurry()
        await store.open()
        try:
            await store.write(
                lambda c: clock_jumps.boot(c, store.clock.now_ms())
            )  # before anything is judged by its age
            done = await Collector(store, Blobs(folder.blobs), retention).collect(args.dry_run, args.resume)
        finally:
            await store.close()
        return done.rows(), done.stopped

    return asyncio.run(main())


def _end_after_failed_commit(error: BaseException) -> None:
    """End the process: after a failed commit nobody knows what is durable, and the next start reads it anew."""
    complain(f"the database cannot be written: {error}", "free space, then artd check")
    os._exit(FAILED)


def _tell(data: Path, dry: bool, rows: list[dict[str, Any]], stopped: str) -> None:
    would = "would go: " if dry else ""
    for row in rows:
        print(f"{would}{row['count']} {row['kind']}  {show.size(row['bytes'])}  {WORDS[row['what']]}")
    if not rows:
        print("nothing to delete", file=sys.stderr)
    if any(row["what"] == "trashed" for row in rows) and not dry:
        print("the trash is emptied at the next pass: within ten minutes, or by artctl gc", file=sys.stderr)
    if stopped:
        where = daemon_probe.data_dir_option(data)
        print(
            f"nothing is deleted by its age: {stopped}. Next: artctl gc --resume{where}, if the clock is right",
            file=sys.stderr,
        )

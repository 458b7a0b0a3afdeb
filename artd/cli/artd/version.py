"""`artd version`: prints the versions to name in a bug report. Exit code: 0."""

from __future__ import annotations

import argparse
import platform
import sqlite3

from artd import __version__
from artd.cli.outcome import OK


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    sub.add_parser("version", help="versions of artd, Python and SQLite").set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    print(f"artd {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")
    return OK

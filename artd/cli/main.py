"""`artd`: run the daemon, its runtimes, its doctor.

Owner of: no state. Invariants: a verb's heavy imports happen when it runs.
"""

from __future__ import annotations

import argparse
import platform
import sqlite3
import sys
from collections.abc import Sequence

from artd import __version__
from artd.cli.artd import check, doctor, model, restore, runtime, start, stop, systemd
from artd.cli.replay_job import verb as replay_job

from .outcome import OK, Parser, arguments, guarded, parsed, shared

VERBS = (start, stop, systemd, check, restore, replay_job, model, runtime, doctor)
EPILOG = """Look at a daemon and steer it with artctl. Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not running, 5 not found,
6 conflict, 7 timed out, 130 interrupted"""


def parser() -> Parser:
    out = Parser(
        prog="artd",
        description="A durable daemon for RL post-training: run it, check it, install what it runs.",
        epilog=EPILOG,
        parents=[shared()],
    )
    out.add_argument("--version", action="version", version=f"artd {__version__}")
    sub = out.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in VERBS:
        module.register(sub)
    sub.add_parser("version", help="versions of artd, Python and SQLite").set_defaults(run=_version)
    return out


def _version(_args: argparse.Namespace) -> int:
    print(f"artd {__version__}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}")
    return OK


def main(argv: Sequence[str] | None = None) -> int:
    args = parsed(parser(), arguments(argv))
    return guarded(lambda: int(args.run(args)), getattr(args, "data_dir", None))


if __name__ == "__main__":
    sys.exit(main())

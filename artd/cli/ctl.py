"""`artctl`: look at a daemon and steer it.

Owner of: no state. Invariants: reading verbs read the database and the log files, so they work while the daemon is down;
steering verbs go through the client. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from artd import __version__

from .outcome import Parser, arguments, guarded, parsed, shared

VERBS = {
    "status": "status.verb",
    **dict.fromkeys(("runs", "jobs", "trajectories", "checkpoints", "workers", "pushes"), "artctl.lists"),
    "job": "artctl.job",
    "logs": "artctl.logs",
    "events": "artctl.events",
    **dict.fromkeys(
        ("cancel", "discard", "discard-group", "retry", "pause", "resume", "finish", "delete", "rollback"), "artctl.act"
    ),
    "export": "artctl.export",
    "backup": "artctl.backup",
    "gc": "artctl.gc",
    "mismatch": "mismatch.verb",
    "key": "artctl.key",
}
"""Verb -> module that registers it."""
EPILOG = """Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not running, 4 degraded (status), 5 not found, 6 conflict,
7 timed out, 130 interrupted"""


def parser(verb: str = "") -> Parser:
    """The parser with every verb, or with those of one verb's module alone: imports are most of a short command."""
    out = Parser(
        prog="artctl",
        description="Look at a daemon and steer it. Begin with `artctl status`.",
        epilog=EPILOG,
        parents=[shared()],
    )
    out.add_argument("--version", action="version", version=f"artctl {__version__}")
    sub = out.add_subparsers(dest="verb", required=True, metavar="VERB")
    for module in [VERBS[verb]] if verb else dict.fromkeys(VERBS.values()):
        importlib.import_module(f"artd.cli.{module}").register(sub)
    return out


def chosen(words: Sequence[str]) -> str:
    """The verb, when the first word that is no option (nor an option's value) is one."""
    rest = iter(words)
    for word in rest:
        if word in ("--data-dir", "--config"):
            next(rest, None)
        elif not word.startswith("-"):
            return word if word in VERBS else ""
    return ""


def main(argv: Sequence[str] | None = None) -> int:
    words = arguments(argv)
    args = parsed(parser(chosen(words)), words)
    return guarded(lambda: int(args.run(args)), getattr(args, "data_dir", None))


if __name__ == "__main__":
    sys.exit(main())

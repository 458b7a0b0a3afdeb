"""`artctl`: shows what a daemon does, and steers it.

Verbs that read use the database and the log files, so they work while the daemon is down. Verbs that steer go through the
client. Heavy imports happen when a verb needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .outcome import Parser, command_parser, main_of

DESCRIPTION = "Look at a daemon and steer it. Begin with `artctl status`."
EPILOG = """artd and artctl are one program: each runs the verbs of both, and lists its own. Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not running, 4 degraded (status), 5 not found, 6 conflict,
7 timed out, 130 interrupted"""


def parser(verb: str = "") -> Parser:
    """Return the parser with every verb, or with those of one verb's module alone."""
    return command_parser("artctl", DESCRIPTION, EPILOG, verb)


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

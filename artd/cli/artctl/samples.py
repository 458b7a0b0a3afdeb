"""`artctl samples|show`: what was asked, what the model answered, and what it earned.

Both read the database, the blobs and the model folder. Exit codes: 0, 3 no daemon ever ran here, 5 there is no such run or trajectory.
"""

from __future__ import annotations

import argparse
from typing import Any

import msgspec

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import NOT_FOUND, OK, CliError, at_least, shared_options
from artd.cli.texts import picture
from artd.cli.texts.load import Loaded, load
from artd.store import samples

VERBS = ("samples", "show")
MOST = (1 << 63) - 1
"""The largest id that an SQLite column stores."""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("samples", help="prompts and answers of a run, as text", parents=[shared_options()])
    parser.add_argument("of_run", metavar="RUN", nargs="?", default="", help="default: the one that is not finished")
    parser.add_argument(
        "--step", type=at_least(0), metavar="N", help="of the batch that made this step (default: the newest)"
    )
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--best", dest="pick", action="store_const", const="best", help="with the highest rewards")
    order.add_argument("--worst", dest="pick", action="store_const", const="worst", help="with the lowest rewards")
    order.add_argument("--random", dest="pick", action="store_const", const="random", help="drawn at random")
    parser.add_argument(
        "--eval", dest="split", action="store_const", const="eval", default="train", help="of the split eval"
    )
    parser.add_argument("-n", "--limit", type=at_least(1), default=5, help="trajectories at most (default 5)")
    parser.add_argument("--full", action="store_true", help="every message, not cut")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run, pick="newest")
    parser = sub.add_parser("show", help="one trajectory: its conversation, or its tokens", parents=[shared_options()])
    parser.add_argument("id", type=at_least(1), metavar="TRAJECTORY", help="its number in `artctl samples`")
    parser.add_argument(
        "--tokens", choices=picture.VIEWS, nargs="?", const="logprob", metavar="BY",
        help=f"every token, coloured by {', '.join(picture.VIEWS)} (default logprob); without colours as a table",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run_show)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        name = database.find_run(args.of_run)
        choice = samples.Choice(args.step, args.split, args.pick, args.limit)
        with database.explain_errors() as connection:
            rows = [read.decode(row) for row in samples.choose(connection, name, choice)]
        found = [load(database, data, row) for row in rows]
    finally:
        database.close()
    if args.json:
        told = {"run": name, "step": args.step, "split": args.split, "pick": args.pick}
        show.document("samples", data, **told, samples=[_document(one, False) for one in found])
        return OK
    if not found:
        where = f"step {args.step} of run {name}" if args.step is not None else f"run {name}"
        print(f"{where} has no trajectories{' of the split eval' if args.split == 'eval' else ''}")
    for number, one in enumerate(found):
        print(*([""] if number else []), picture.head(one), sep="\n" if number else "")
        for line in (*picture.problems(one), *(picture.whole(one) if args.full else picture.brief(one))):
            print(line)
    return OK


def run_show(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        found = load(database, data, _find(database, args.id))
    finally:
        database.close()
    if args.json:
        show.document("show", data, trajectory=_document(found, args.tokens is not None))
        return OK
    print(picture.head(found))
    for line in (*picture.notes(found.row), *picture.problems(found)):
        print(line)
    for line in picture.tokens(found, args.tokens) if args.tokens else picture.whole(found):
        print(line)
    return OK


def _find(database: read.Database, number: int) -> read.Row:
    """Return the row of a trajectory. Raises CliError(NOT_FOUND)."""
    rows = database.page("trajectories", after=min(number, MOST) - 1, limit=1)
    if not rows or rows[0]["id"] != number:
        newest = database.page("trajectories", limit=1)
        hint = f"; the newest is {newest[0]['id']}" if newest else "; there is none yet"
        raise CliError(NOT_FOUND, f"there is no trajectory {number}{hint}", "artctl samples")
    return rows[0]


def _document(found: Loaded, tokens: bool) -> dict[str, Any]:
    """Return a trajectory as JSON: its row, and its messages by sequence. `tokens` adds every token."""
    passages = [msgspec.to_builtins(passage) for passage in found.passages]
    for passage in () if tokens else passages:
        del passage["tokens"]
    problem = {"problem": found.missing or found.untold}
    return show.stamp_times(found.row) | {"advantage": found.advantage} | problem | {"sequences": passages}

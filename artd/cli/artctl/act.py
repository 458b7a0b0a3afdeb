"""`artctl cancel|discard|discard-group|retry|pause|resume|set|finish|delete|rollback`: the orders of an operator.

Exit codes: 0, 1 refused, 3 the daemon does not run, 5 no such job, run or step, 6 its state does not allow it, 7 the daemon did
not answer in time.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import (
    CONFLICT,
    FAILED,
    NOT_FOUND,
    NOT_RUNNING,
    OK,
    TIMED_OUT,
    USAGE,
    CliError,
    at_least,
    shared_options,
)

from . import job as jobs

if TYPE_CHECKING:
    from artd_client import SyncClient

VERBS = ("cancel", "discard", "discard-group", "retry", "pause", "resume", "set", "finish", "delete", "rollback")
TIMEOUT_S = 30.0
WAIT = "seconds that the daemon may take to answer (default: %(default)g)"


@dataclass(frozen=True)
class Act:
    """One verb.

    `of`: what it acts on, a job, a run, a group (RUN GROUP) or a step (RUN@STEP). `done`: the text after it. `call` carries it
    out; its last argument is what `_target` returns. `final`: it cannot be undone, so its run must be named in full. `reason`:
    it has --reason. `confirm`: it asks first. `changes`: it takes NAME=VALUE.
    """

    of: Literal["job", "run", "group", "step"]
    help: str
    done: str
    call: Callable[[SyncClient, argparse.Namespace, Any], object]
    final: bool = False
    reason: bool = False
    confirm: bool = False
    changes: bool = False


def _roll_back(art: SyncClient, _args: argparse.Namespace, target: str) -> None:
    name, _, step = target.partition("@")
    art.run(name).rollback(int(step))


def _update(art: SyncClient, args: argparse.Namespace, name: str) -> None:
    changes: dict[str, Any] = {}
    for path, value in args.changes:
        *outer, last = path.split(".")
        inner = changes
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    art.run(name).update(**changes)


ACTS = {
    "cancel": Act(
        "job",
        "end a job for good; its trajectories wait again and the run pauses",
        "job {} will not run again",
        lambda art, args, job: art.cancel(job),
    ),
    "discard": Act(
        "job",
        "end a job for good with its trajectories, which are never trained",
        "job {} and its batch are discarded",
        lambda art, args, job: art.discard(job),
    ),
    "discard-group": Act(
        "group",
        "discard an open or sealed group, which is never trained",
        "group {} is discarded",
        lambda art, args, group: art.run(args.name).discard_group(group),
    ),
    "retry": Act(
        "job",
        "queue a quarantined job again, on the same batch; its run continues",
        "job {} is queued again",
        lambda art, args, job: art.retry(job),
    ),
    "pause": Act(
        "run",
        "stop training; the run is still served",
        "run {} is paused",
        lambda art, args, name: art.run(name).pause(args.reason),
        reason=True,
    ),
    "resume": Act(
        "run", "let a paused run train again", "run {} is active", lambda art, args, name: art.run(name).resume()
    ),
    "set": Act(
        "run",
        "change what a run learns with, from its next batch on",
        "run {} learns with it from its next batch on",
        _update,
        changes=True,
    ),
    "finish": Act(
        "run",
        "end a run for good; its engine and trainer stop, its jobs are cancelled",
        "run {} is finished",
        lambda art, args, name: art.run(name).finish(),
        final=True,
    ),
    "delete": Act(
        "run",
        "delete a finished run with its trajectories and checkpoints",
        "run {} is deleted; its files go by themselves",
        lambda art, args, name: art.run(name).delete(),
        final=True,
        confirm=True,
    ),
    "rollback": Act("step", "continue from an older step, in a new lineage", "{} is the newest step again", _roll_back),
}


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, act in ACTS.items():
        parser = sub.add_parser(verb, help=act.help, parents=[shared_options()])
        if act.of == "job":
            parser.add_argument("id", type=at_least(1), metavar="JOB", help="its number in `artctl jobs`")
        elif act.of == "group":
            parser.add_argument("name", metavar="RUN", help="its name in `artctl runs`")
            parser.add_argument("group", metavar="GROUP", help="its name in `artctl trajectories`")
        elif act.of == "step":
            parser.add_argument(
                "checkpoint",
                metavar="RUN@STEP",
                help="a kept step of `artctl checkpoints`; without RUN of the run that is not finished; pause it first",
            )
        else:
            needed = act.final or act.changes
            told = "its name" if needed else "default: the one that is not finished"
            parser.add_argument("name", metavar="RUN", nargs=None if needed else "?", default="", help=told)
        if act.changes:
            parser.add_argument(
                "changes",
                metavar="NAME=VALUE",
                nargs="+",
                type=_change,
                help="a field of optimizer or loss, such as optimizer.lr=1e-6; VALUE is JSON, null takes the field back to its default",
            )
        if act.reason:
            parser.add_argument(
                "--reason", default="operator", help="what `artctl status` says of it (default: operator)"
            )
        if act.confirm:
            parser.add_argument("--yes", action="store_true", help="do not ask")
        parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
        parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S", help=WAIT)
        parser.set_defaults(run=run)


def _change(text: str) -> tuple[str, Any]:
    """Split NAME=VALUE. VALUE is JSON, or text as it stands."""
    name, equals, value = text.partition("=")
    if not equals or not all(name.split(".")):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, such as optimizer.lr=1e-6")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    act = ACTS[args.verb]
    database = read.Database(data)
    try:
        target = _target(database, args, act)
        if act.confirm and not args.yes:
            _confirm(database, str(target))
    finally:
        database.close()
    daemon_probe.need_running(data)
    with open_client(data, args.timeout) as art:
        act.call(art, args, target)
    done = act.done.format(target)
    if args.json:
        show.print_document(
            "artctl.order/1", data, {"order": args.verb, "of": act.of, "target": str(target), "done": done}
        )
    else:
        print(done, file=sys.stderr)
    return OK


def _target(database: read.Database, args: argparse.Namespace, act: Act) -> str | int:
    """Return what the verb acts on: a job's number, a group's or a run's name, or RUN@STEP. Raises CliError."""
    if act.of == "job":
        return int(jobs.find(database, args.id)["id"])
    if act.of == "group":
        database.require_run(args.name)
        return str(args.group)
    if act.of == "run":
        return _run_name(database, args.name)
    name, _, step = args.checkpoint.partition("@")
    if not step.isdigit():
        raise CliError(USAGE, f"{args.checkpoint!r} is not RUN@STEP", "artctl checkpoints")
    return f"{_run_name(database, name)}@{int(step)}"


def _run_name(database: read.Database, name: str) -> str:
    """Return the named run, or without a name the one that is not finished. Raises CliError(NOT_FOUND)."""
    if name:
        return database.require_run(name)
    found = [row["name"] for row in database.rows(read.RUNS, limit=2) if row["state"] != "finished"]
    if not found:
        raise CliError(NOT_FOUND, "no run is active", "artctl runs")
    if len(found) > 1:
        raise CliError(USAGE, "several runs are active: name one", "artctl runs")
    return str(found[0])


def _confirm(database: read.Database, name: str) -> None:
    """Ask whether a run may be deleted. Raises CliError when stdin is not a terminal, or the answer is no."""
    if not sys.stdin.isatty():
        raise CliError(
            USAGE,
            f"run {name} would be deleted, and stdin is not a terminal that could confirm it",
            f"artctl delete {name} --yes",
        )
    (held,) = database.rows(read.HELD, run=name)
    print(
        f"run {name}: {held['trajectories']} trajectories, {held['checkpoints']} checkpoints"
        f" ({show.size(held['bytes'])}). They cannot be brought back. Delete? [y/N] ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CliError(FAILED, f"run {name} stays", f"artctl export {name} DIR")


@contextmanager
def open_client(data: Path, timeout: float) -> Iterator[SyncClient]:
    """Open a client; turn its errors into CliError with the documented exit codes."""
    import artd_client as client

    codes: dict[type[client.ArtdError], int] = {
        client.NotFound: NOT_FOUND,
        client.Conflict: CONFLICT,
        client.TimedOut: TIMED_OUT,
        client.DaemonNotRunning: NOT_RUNNING,
    }
    try:
        with client.SyncClient(data, timeout=timeout) as art:
            yield art
    except client.ArtdError as error:
        raise CliError(
            codes.get(type(error), FAILED), error.message, f"artctl status{daemon_probe.data_dir_option(data)}"
        ) from None

"""`artctl cancel|retry|pause|resume|finish`: what an operator may do.

Owner of: no state. Exit codes: 0, 1 refused, 3 the daemon does not run, 5 there is no such job or run, 6 its state does
not allow it, 7 the daemon did not answer in time.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import job as jobs
from . import probe, read
from .outcome import CONFLICT, FAILED, NOT_FOUND, OK, TIMED_OUT, CliError, shared

if TYPE_CHECKING:
    from artd_schema import client_api as api

TIMEOUT_S = 30.0
_CODES = {"not_found": NOT_FOUND, "conflict": CONFLICT}


@dataclass(frozen=True)
class Act:
    """One verb. of: job or run; done: what is said afterwards."""

    of: str
    help: str
    done: str


ACTS = {
    "cancel": Act(
        "job", "end a job for good; its trajectories wait again and the run pauses", "job {} will not run again"
    ),
    "retry": Act("job", "queue a quarantined job again, on the same batch; its run goes on", "job {} is queued again"),
    "pause": Act("run", "train no further; the run is still served", "run {} is paused"),
    "resume": Act("run", "let a paused run train again", "run {} is active"),
    "finish": Act("run", "end a run for good; its engine and trainer stop", "run {} is finished"),
}


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, act in ACTS.items():
        parser = sub.add_parser(verb, help=act.help, parents=[shared()])
        if act.of == "job":
            parser.add_argument("id", type=int, metavar="JOB")
        else:
            # What cannot be undone is named in full.
            parser.add_argument("name", metavar="RUN", nargs=None if verb == "finish" else "?", default="")
        if verb == "pause":
            parser.add_argument("--reason", default="operator")
        parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="S")
        parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = probe.data_dir(args)
    act = ACTS[args.verb]
    database = read.Database(data)
    try:
        target = jobs.find(database, args.id)["id"] if act.of == "job" else _run_name(database, args.name)
    finally:
        database.close()
    probe.need_running(data)
    _ask(data, _operation(args, target), args.timeout)
    print(act.done.format(target), file=sys.stderr)
    return OK


def _run_name(database: read.Database, name: str) -> str:
    """The named run, or the one that is not finished. Raises CliError(NOT_FOUND)."""
    if name:
        return database.checked_run(name)
    newest = database.rows(read.RUNS, limit=1)
    if not newest or newest[0]["state"] == "finished":
        raise CliError(NOT_FOUND, "no run is active", "artctl runs")
    return str(newest[0]["name"])


def _operation(args: argparse.Namespace, target: str | int) -> api.Op:
    from artd_schema import client_api as api

    if args.verb == "cancel":
        return api.CancelJob(job=int(target))
    if args.verb == "retry":
        return api.RetryJob(job=int(target))
    if args.verb == "pause":
        return api.Pause(run=str(target), reason=args.reason)
    if args.verb == "resume":
        return api.Resume(run=str(target))
    return api.Finish(run=str(target))


def _ask(data: Path, op: api.Op, timeout_s: float) -> None:
    """One request. Raises CliError."""
    from .ask import NoAnswer, Refused, ask

    try:
        ask(data, op, timeout_s)
    except Refused as error:
        raise CliError(_CODES.get(error.code, FAILED), str(error), f"artctl status{probe.option(data)}") from None
    except NoAnswer as error:
        raise CliError(TIMED_OUT, str(error), f"artctl logs daemon{probe.option(data)}") from None

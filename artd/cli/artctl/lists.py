"""`artctl runs|jobs|trajectories|groups|rollouts|batches|checkpoints|workers|pushes`: lists rows of one table, newest first.

Exit codes: 0 (also for no rows), 3 no daemon ever ran here, 5 no such run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artd.cli import daemon_probe, read, show, terminal
from artd.cli.outcome import OK, at_least, shared_options
from artd.cli.show import Row
from artd.cli.status import problems
from artd.cli.status.snapshot import JOB_STATES, _alive
from artd.store import pages
from artd_schema.run.spec_defaults import spec_value

VERBS = ("runs", "jobs", "trajectories", "groups", "rollouts", "batches", "checkpoints", "workers", "pushes")


@dataclass(frozen=True)
class Listing:
    """One verb. `columns`: heading -> function from a row to the cell; `states`: values of --state; `by_run`: it has --run."""

    help: str
    columns: dict[str, Callable[[Row], Any]]
    states: tuple[str, ...] = ()
    by_run: bool = True


def _of(key: str) -> Callable[[Row], Any]:
    return lambda row: row[key]


def _age(row: Row) -> str:
    return show.ago(row["created"])


def _took(row: Row) -> str:
    return show.span(row["ended"] - (row["started"] or row["created"])) if row["ended"] else ""


def _number(key: str, digits: int = 4) -> Callable[[Row], str]:
    return lambda row: "" if row.get(key) is None else f"{row[key]:.{digits}g}"


def _metric(key: str) -> Callable[[Row], str]:
    return lambda row: f"{row['metrics'][key]:.4g}" if key in row["metrics"] else ""


def _coverage(row: Row) -> str:
    """Return the share of the batch's tokens whose experts are replayed."""
    return "" if row["batch_covered"] is None else f"{row['batch_covered'] / row['batch_tokens']:.1%}"


def _next(job: Row, data: Path) -> str:
    """Return the command that helps a quarantined job, "" for other jobs."""
    choices = problems.choices(job, daemon_probe.data_dir_option(data)) if job["state"] == "quarantined" else []
    return choices[0].command if choices else ""


def _epochs(row: Row) -> str:
    if row["epoch_min"] is None:
        return ""
    return str(row["epoch_min"]) if row["epoch_min"] == row["epoch_max"] else f"{row['epoch_min']}-{row['epoch_max']}"


LISTINGS: dict[str, Listing] = {
    "runs": Listing(
        "runs, the one that is not finished first",
        {
            "name": _of("name"),
            "state": _of("state"),
            "step": _of("step"),
            "served": _of("served"),
            "mode": lambda row: spec_value(row["spec"], "rollout_weights_mode"),
            "created": _age,
            "model": lambda row: row["spec"].get("model", ""),
            "reason": _of("reason"),
        },
        by_run=False,
    ),
    "jobs": Listing(
        "jobs of the trainer: steps that are, were or wait to be trained",
        {
            "id": _of("id"),
            "run": _of("run"),
            "kind": _of("kind"),
            "step": _of("step"),
            "state": _of("state"),
            "attempts": _of("attempts"),
            "fence": _of("fence"),
            "took": _took,
            "created": _age,
            "loss": _metric("loss"),
            "reward": _metric("reward_mean"),
            "replay": _coverage,
            "error": lambda row: show.one_line(row["error"], 60),
            "next": _of("next"),
        },
        JOB_STATES,
    ),
    "trajectories": Listing(
        "trajectories with their rewards, and why one was discarded",
        {
            "id": _of("id"),
            "run": _of("run"),
            "group": _of("group"),
            "split": _of("split"),
            "state": _of("state"),
            "reward": _number("reward"),
            "tokens": _of("tokens"),
            "epochs": _epochs,
            "created": _age,
            "reason": _of("reason"),
        },
        ("queued", "packed", "trained", "discarded"),
    ),
    "groups": Listing(
        "groups of trajectories, and why one was discarded",
        {
            "id": _of("id"),
            "run": _of("run"),
            "name": _of("name"),
            "split": _of("split"),
            "state": _of("state"),
            "size": _of("size"),
            "created": _age,
            "reason": _of("reason"),
        },
        pages.states_of("groups"),
    ),
    "rollouts": Listing(
        "rollouts by name: their responses, and which expired because nobody submitted them",
        {
            "id": _of("id"),
            "run": _of("run"),
            "name": _of("name"),
            "state": _of("state"),
            "responses": _of("responses"),
            "superseded": _of("superseded"),
            "trajectory": _of("trajectory_id"),
            "last": lambda row: show.ago(row["touched"]),
        },
        pages.states_of("rollouts"),
    ),
    "batches": Listing(
        "packed batches: what each step was trained on",
        {
            "id": _of("id"),
            "run": _of("run"),
            "step": _of("step"),
            "state": _of("state"),
            "payload": _of("payload"),
            "trajectories": _of("trajectories"),
            "tokens": _of("tokens"),
            "fill": lambda row: f"{row['fill']:.1%}",
            "created": _age,
            "manifest": lambda row: row["manifest"][:12],
        },
        pages.states_of("batches"),
    ),
    "checkpoints": Listing(
        "committed steps and their folders",
        {
            "checkpoint": lambda row: f"{row['run']}@{row['step']}",
            "state": _of("state"),
            "epoch": _of("epoch"),
            "lineage": lambda row: f"{row['lineage']} (left)" if row["abandoned"] else row["lineage"],
            "size": lambda row: show.size(row["bytes"]),
            "sha": lambda row: row["sha"][:12],
            "created": _age,
            "dir": _of("dir"),
        },
        ("committed", "retired"),
    ),
    "workers": Listing(
        "trainer and engines of each run that is not finished, and the gateway",
        {
            "name": _of("name"),
            "run": lambda row: row["run"] or "",
            "state": _of("state"),
            "alive": lambda row: "yes" if row["alive"] else "no",
            "pid": _of("pid"),
            "spawn": _of("spawn"),
            "restarts": _of("restarts"),
            "since": lambda row: show.ago(row["since"]),
            "error": lambda row: show.one_line(row["error"], 80),
        },
        by_run=False,
    ),
    "pushes": Listing(
        "pushes of checkpoints into engines: source, transfer, duration",
        {
            "id": _of("id"),
            "engine": _of("engine"),
            "checkpoint": lambda row: f"{row['run']}@{row['step']}",
            "mode": _of("mode"),
            "source": _of("source"),
            "by": _of("transfer"),
            "state": _of("state"),
            "attempts": _of("attempts"),
            "max_abs": _number("max_abs", 2),
            "took": lambda row: show.span(1000 * sum(row["seconds"].values())) if row["seconds"] else "",
            "created": _age,
            "error": lambda row: show.one_line(row["error"], 60),
        },
        ("prepared", "sending", "live", "superseded", "failed"),
    ),
}


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    for verb, listing in LISTINGS.items():
        parser = sub.add_parser(verb, help=listing.help, parents=[shared_options()])
        parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
        parser.add_argument("-n", "--limit", type=at_least(1), default=50, help="rows at most (default 50)")
        if listing.by_run:
            parser.add_argument("--run", dest="of_run", default="", metavar="RUN", help="only rows of this run")
            parser.add_argument("--before", type=at_least(0), metavar="ID", help="only those with a smaller id")
            parser.add_argument(
                "--after", type=at_least(0), metavar="ID", help="only those with a larger id, oldest first"
            )
        if listing.states:
            parser.add_argument("--state", choices=listing.states, default="", help="only rows in this state")
        if verb == "trajectories":
            parser.add_argument("--group", default="", help="only rows of this group")
            parser.add_argument("--split", choices=("train", "eval"), default="", help="only rows of this split")
        terminal.wide_option(parser)
        parser.set_defaults(run=run)


def _read(database: read.Database, args: argparse.Namespace, run: str) -> list[Row]:
    if args.verb == "runs":
        return database.rows(read.RUNS, limit=args.limit)
    if args.verb == "workers":
        return database.rows(read.WORKERS)
    states = (args.state,) if args.state else ()
    more = {name: getattr(args, name) for name in ("group", "split") if getattr(args, name, "")}
    return database.page(
        args.verb, run=run, states=states, before=args.before, after=args.after, limit=args.limit, **more
    )


def run(args: argparse.Namespace) -> int:
    listing = LISTINGS[args.verb]
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        wanted = database.require_run(getattr(args, "of_run", ""))
        rows = _read(database, args, wanted)
    finally:
        database.close()
    if args.verb == "runs" and not daemon_probe.find_daemon(data).running:
        rows = [row | {"served": -1} for row in rows]  # nothing is served while the daemon is down
    if args.verb == "workers":
        rows = [row | {"alive": _alive(row)} for row in rows]
    if args.verb == "jobs":
        rows = [row | {"next": _next(row, data)} for row in rows]
    if args.json:
        show.document(args.verb, data, **{args.verb: [show.stamp_times(row) for row in rows]})
    elif not rows:
        filtered = wanted or any(getattr(args, name, None) for name in ("state", "group", "split", "before", "after"))
        print(f"no {args.verb}" + (" that match" if filtered else " yet"))
    else:
        shown = {
            name: cell for name, cell in listing.columns.items() if any(cell(row) not in ("", None) for row in rows)
        }
        show.table(list(shown), [[cell(row) for cell in shown.values()] for row in rows])
    return OK

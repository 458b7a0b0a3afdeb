"""`artctl job ID`: shows one job with its attempts, the evidence of failed ones, and what to do about it.

Exit codes: 0, 3 no daemon ever ran here, 5 no such job.
"""

from __future__ import annotations

import argparse

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import NOT_FOUND, OK, CliError, at_least, shared_options
from artd.cli.show import Row
from artd.cli.status import problems
from artd_schema.text.plain import plain


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser(
        "job", help="one job: its metrics, attempts, evidence and batch", parents=[shared_options()]
    )
    parser.add_argument("id", type=at_least(1), metavar="JOB", help="its number in `artctl jobs`")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def find(database: read.Database, number: int) -> Row:
    """Return the job's row. Raises CliError(NOT_FOUND)."""
    rows = database.rows(read.JOB, id=number)
    if not rows:
        newest = database.page("jobs", limit=1)
        hint = f"; the newest is {newest[0]['id']}" if newest else "; there is none yet"
        raise CliError(NOT_FOUND, f"there is no job {number}{hint}", "artctl jobs")
    return rows[0]


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        job = find(database, args.id)
        attempts = database.rows(read.ATTEMPTS, id=args.id)
        members = database.rows(read.MEMBERS, batch=job["batch_id"])
    finally:
        database.close()
    choices = problems.choices(job, daemon_probe.data_dir_option(data))
    if args.json:
        told = show.stamp_times(job) | {"next": choices[0].command if choices else ""}
        rows = [show.stamp_times(row) for row in attempts]
        show.document(
            "job", data, job=told, choices=[c._asdict() for c in choices], attempts=rows, trajectories=members
        )
        return OK
    print(
        f"job {job['id']}  {show.state(job['state'])}   {job['kind']} step {job['step']} of {job['run']}   fence {job['fence']}"
    )
    print(f"  created   {show.iso(job['created'])}")
    for key in ("started", "ended"):
        if job[key]:
            print(f"  {key:9} {show.iso(job[key])}")
    if job["worker"]:
        print(f"  worker    {job['worker']} (spawn {job['spawn']})")
    if job["batch_id"]:
        print(f"  batch     {job['batch_id']}   {job['batch_tokens']} tokens{_coverage(job)}")
    for title in ("metrics", "seconds"):
        if job[title]:
            print(f"  {title:9} " + "  ".join(f"{k}={v:.4g}" for k, v in sorted(job[title].items())))
    for line in job["error"].splitlines():
        print(f"  {show.paint('error', 'red')}     {plain(line)}")
    width = max((len(choice.command) for choice in choices), default=0)
    for number, choice in enumerate(choices):
        print(f"  {'' if number else 'next':9} {choice.command.ljust(width)}   {choice.does}")
    if attempts:
        columns = ("fence", "worker", "outcome", "took", "error")
        show.table(
            columns,
            [(a["fence"], a["worker"], a["outcome"], _took(a), show.one_line(a["error"], 80)) for a in attempts],
        )
    if job["state"] == "quarantined":
        _evidence(attempts, members)
    return OK


def _evidence(attempts: list[Row], members: list[Row]) -> None:
    """Print what failed attempts left behind, and the trajectories that they trained on."""
    for attempt in attempts:
        if attempt["evidence"]:
            print(show.paint(f"attempt {attempt['fence']} ({attempt['outcome']}), last lines of its worker:", "dim"))
            print("\n".join(f"  | {plain(line)}" for line in attempt["evidence"].splitlines()))
    if members:
        print(show.paint("its batch:", "dim"))
        show.table(tuple(members[0]), [tuple(row.values()) for row in members])


def _coverage(job: Row) -> str:
    return "" if job["batch_covered"] is None else f", {job['batch_covered']} with the routes of their experts"


def _took(attempt: Row) -> str:
    return show.span(attempt["ended"] - attempt["started"]) if attempt["ended"] else ""

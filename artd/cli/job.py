"""`artctl job ID`: one job with its attempts, and what to do about it.

Owner of: no state. Exit codes: 0, 3 no daemon ever ran here, 5 there is no such job.
"""

from __future__ import annotations

import argparse

from . import probe, read, show
from .outcome import NOT_FOUND, OK, CliError, shared
from .show import Row


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("job", help="one job with its attempts", parents=[shared()])
    parser.add_argument("id", type=int, metavar="JOB")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    parser.set_defaults(run=run)


def find(database: read.Database, number: int) -> Row:
    """The job's row. Raises CliError(NOT_FOUND)."""
    rows = database.rows(read.JOBS, run="", state="", id=number, limit=1)
    if not rows:
        newest = database.rows(read.JOBS, run="", state="", id=0, limit=1)
        hint = f"; the newest is {newest[0]['id']}" if newest else "; there is none yet"
        raise CliError(NOT_FOUND, f"there is no job {number}{hint}", "artctl jobs")
    return rows[0]


def advice(job: Row, where: str) -> str:
    """The operator's next command for a job, or nothing."""
    if job["state"] == "quarantined":
        return (
            f"artctl retry {job['id']}{where}   (or artctl cancel {job['id']}{where}: its batch goes back to the queue)"
        )
    if job["state"] in ("queued", "running") and job["attempts"]:
        return f"artctl logs trainer{where}"
    return ""


def run(args: argparse.Namespace) -> int:
    data = probe.data_dir(args)
    database = read.Database(data)
    try:
        job = find(database, args.id)
        attempts = database.rows(read.ATTEMPTS, id=args.id)
    finally:
        database.close()
    then = advice(job, probe.option(data))
    if args.json:
        rows = [show.stamped(row) for row in attempts]
        show.document("job", data, job=show.stamped(job) | {"next": then}, attempts=rows)
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
    if job["batch"]:
        print(f"  batch     {job['batch']}   {job['batch_tokens']} tokens{_coverage(job)}")
    for title in ("metrics", "seconds"):
        if job[title]:
            print(f"  {title:9} " + "  ".join(f"{k}={v:.4g}" for k, v in sorted(job[title].items())))
    for line in job["error"].splitlines():
        print(f"  {show.paint('error', 'red')}     {line}")
    if then:
        print(f"  next      {then}")
    if attempts:
        columns = ("fence", "worker", "outcome", "took", "error")
        show.table(
            columns,
            [(a["fence"], a["worker"], a["outcome"], _took(a), show.one_line(a["error"], 80)) for a in attempts],
        )
    return OK


def _coverage(job: Row) -> str:
    return "" if job["batch_covered"] is None else f", {job['batch_covered']} with the routes of their experts"


def _took(attempt: Row) -> str:
    return show.span(attempt["ended"] - attempt["started"]) if attempt["ended"] else ""

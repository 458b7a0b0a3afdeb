"""`artctl metrics|diff`: what each step measured, as a table of steps, and two steps side by side.

Exit codes: 0, 3 no daemon ever ran here, 5 there is no such run, step or metric.
"""

from __future__ import annotations

import argparse
import csv
import sys
from typing import Any

from artd.cli import daemon_probe, read, show, terminal
from artd.cli.outcome import NOT_FOUND, OK, USAGE, CliError, at_least, near, shared_options
from artd.cli.show import Row

VERBS = ("metrics", "diff")
USUAL = (
    "reward_mean", "sampled_reward_mean", "eval_reward_mean", "loss", "kl_k3", "entropy", "ratio_p99", "clipped_fraction",
    "answer_tokens_mean", "truncated_fraction", "staleness_mean", "grad_norm", "tokens_per_s",
)  # fmt: skip
"""Shown where nothing else is asked for, as far as the run has them."""
STEPS = """
SELECT k.step, k.epoch, k.lineage, k.created, j.id AS job, j.metrics, j.seconds FROM checkpoint k JOIN job j ON j.id = k.job_id
WHERE k.run_id = (SELECT id FROM run WHERE name = :run) AND k.abandoned = 0 AND k.step BETWEEN :first AND :last
ORDER BY k.step DESC LIMIT :limit"""
LAST = (1 << 31) - 1


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("metrics", help="what each step measured", parents=[shared_options()])
    parser.add_argument("of_run", metavar="RUN", nargs="?", default="", help="default: the one that is not finished")
    parser.add_argument(
        "-m", "--metric", action="append", default=[], metavar="NAME", help="this column (again for more)"
    )
    parser.add_argument("--all", action="store_true", help="every metric, one a line, of the newest step")
    parser.add_argument("-n", "--limit", type=at_least(1), default=20, help="steps at most (default 20)")
    parser.add_argument("--csv", action="store_true", help="comma-separated values, oldest step first, every metric")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    terminal.wide_option(parser)
    parser.set_defaults(run=run)
    parser = sub.add_parser("diff", help="metrics of two steps side by side", parents=[shared_options()])
    parser.add_argument("first", metavar="[RUN@]STEP", help="a step")
    parser.add_argument("second", metavar="[RUN@]STEP", help="another one, perhaps of another run")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md)")
    terminal.wide_option(parser)
    parser.set_defaults(run=run_diff)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        name = database.find_run(args.of_run)
        limit = 1_000_000 if args.csv else args.limit
        rows = [row for row in database.rows(STEPS, run=name, first=0, last=LAST, limit=limit) if row["metrics"]]
    finally:
        database.close()
    known = list(dict.fromkeys(key for row in rows for key in row["metrics"]))
    for wanted in args.metric:
        if wanted not in known:
            there = f"; there is {', '.join(sorted(known))}" if known else "; no step has been trained yet"
            raise CliError(
                NOT_FOUND, f"run {name} has no metric {wanted!r}{near(wanted, known)}{there}", "artctl metrics --all"
            )
    if args.json:
        show.document("metrics", data, run=name, steps=[show.stamp_times(row) for row in rows])
    elif args.csv:
        _write_csv(rows, args.metric or sorted(known))
    elif not rows:
        print(f"run {name} has trained no step yet")
    elif args.all:
        print(f"step {rows[0]['step']} of run {name}")
        show.table(("metric", "value"), [(key, _number(value)) for key, value in sorted(rows[0]["metrics"].items())])
    else:
        columns = args.metric or [key for key in USUAL if key in known]
        cells = [
            [row["step"], show.ago(row["created"]), *(_number(row["metrics"].get(key)) for key in columns)]
            for row in rows
        ]
        show.table(["step", "committed", *columns], cells)
    return OK


def _write_csv(rows: list[Row], columns: list[str]) -> None:
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["step", "epoch", "created", *columns])
    for row in reversed(rows):
        out.writerow([row["step"], row["epoch"], row["created"], *(row["metrics"].get(key, "") for key in columns)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def run_diff(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        sides = [_step(database, text) for text in (args.first, args.second)]
        specs = [database.rows("SELECT spec FROM run WHERE name = :run", run=name)[0]["spec"] for name, _ in sides]
    finally:
        database.close()
    titles = [f"{name}@{row['step']}" for name, row in sides]
    rows = _compare(
        *(row["metrics"] | {f"seconds.{key}": value for key, value in row["seconds"].items()} for _, row in sides)
    )
    fields = [row for row in _compare(*map(_flat, specs)) if row["first"] != row["second"]]
    if args.json:
        show.document("diff", data, first=titles[0], second=titles[1], spec=fields, metrics=rows)
        return OK
    if fields:
        show.table(("spec", *titles), [(row["name"], row["first"], row["second"]) for row in fields])
        print()
    cells = [(row["name"], _number(row["first"]), _number(row["second"]), _change(row)) for row in rows]
    show.table(("metric", *titles, "change"), cells)
    return OK


def _step(database: read.Database, text: str) -> tuple[str, Row]:
    """Return (run, row) of [RUN@]STEP. Raises CliError."""
    name, _, number = text.rpartition("@")
    if not number.isdigit() or len(number) > 9:
        raise CliError(USAGE, f"{text!r} is not STEP or RUN@STEP", "artctl checkpoints")
    run = database.find_run(name)
    rows = database.rows(STEPS, run=run, first=int(number), last=int(number), limit=1)
    if not rows:
        raise CliError(NOT_FOUND, f"run {run} has no step {int(number)}", f"artctl checkpoints --run {run}")
    return run, rows[0]


def _compare(first: dict[str, Any], second: dict[str, Any]) -> list[Row]:
    names = sorted(first.keys() | second.keys())
    return [{"name": name, "first": first.get(name), "second": second.get(name)} for name in names]


def _flat(spec: dict[str, Any], front: str = "") -> dict[str, Any]:
    """Return the fields of a spec by their paths."""
    out: dict[str, Any] = {}
    for name, value in spec.items():
        out |= _flat(value, f"{front}{name}.") if isinstance(value, dict) else {front + name: value}
    return out


def _change(row: Row) -> str:
    if row["first"] is None or row["second"] is None:
        return ""
    change = row["second"] - row["first"]
    share = f" ({change / abs(row['first']):+.0%})" if row["first"] else ""
    return f"{change:+.3g}{share}" if change else ""

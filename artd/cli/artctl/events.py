"""`artctl events [-f]`: shows the event table, oldest first.

Exit codes: 0, 3 no daemon ever ran here, 5 no such run, 130 interrupted. -f reads the database, not the daemon, so it goes on
when the daemon restarts.
"""

from __future__ import annotations

import argparse
import time

from artd.cli import daemon_probe, read, show
from artd.cli.outcome import OK, at_least, shared_options
from artd.cli.show import Row

from .status import event_text

POLL_S = 0.25


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("events", help="what happened, oldest first", parents=[shared_options()])
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new ones")
    parser.add_argument("-n", "--limit", type=at_least(1), default=50, help="the newest N (default 50)")
    parser.add_argument("--after", type=at_least(0), metavar="ID", help="only those with a larger id")
    parser.add_argument("--run", dest="of_run", default="", metavar="RUN", help="only events of this run")
    parser.add_argument("--json", action="store_true", help="one JSON document; with -f one object a line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    database = read.Database(data)
    try:
        of_run = database.require_run(args.of_run)
        if args.after is None:
            rows = database.page("events", run=of_run, limit=args.limit)[::-1]
        else:
            rows = database.page("events", run=of_run, after=args.after, limit=args.limit)
        if args.json and not args.follow:
            show.document("events", data, events=[show.stamp_times(row) for row in rows])
            return OK
        last = args.after or 0
        while True:
            for row in rows:
                _print(row, args.json)
                last = row["id"]
            if not args.follow:
                return OK
            time.sleep(POLL_S)
            rows = database.page("events", run=of_run, after=last, limit=1000)
    finally:
        database.close()


def _print(row: Row, as_json: bool) -> None:
    if as_json:
        show.line({"schema": "artctl.event/1"} | show.stamp_times(row))
    else:
        when = show.paint(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"] / 1000)), "dim")
        print(f"{row['id']:>6}  {when}  {event_text(row)}", flush=True)

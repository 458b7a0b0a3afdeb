"""`artctl top`: what each worker uses now, and what it does, again and again until Ctrl-C.

Reads the database and /proc, on the daemon's machine. Exit codes: 0 (with -n), 3 no daemon ever ran here, 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from artd.cli import daemon_probe, read, show, terminal
from artd.cli.outcome import OK, seconds, shared_options
from artd.cli.show import Row
from artd.cli.status.problems import advice
from artd.cli.status.snapshot import Snapshot, doing, take
from artd.cli.watch import cut_lines, watch
from artd.supervise.guardian import all_stats, descendants

TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
FIRST_S = 0.2
"""Time over which the first picture measures CPU use."""


class Use(NamedTuple):
    """What a worker and everything that it started use: processes, CPU time in seconds since their start, resident bytes, threads."""

    processes: int
    cpu_s: float
    rss: int
    threads: int


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("top", help="CPU and memory of the workers, and what they do", parents=[shared_options()])
    parser.add_argument(
        "-d", "--delay", type=seconds, default=2.0, metavar="S", help="seconds between pictures (default 2)"
    )
    parser.add_argument("--once", action="store_true", help="one picture")
    parser.add_argument("--json", action="store_true", help="one JSON document (docs/cli-json.md) of one picture")
    terminal.wide_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    read.Database(data).close()  # an error for a folder without one
    meter = _Meter(data)
    time.sleep(FIRST_S)
    if args.json:
        shot = take(data)
        show.document("top", data, doing=doing(shot), disk_free=shot.disk_free, workers=meter.rows(shot))
        return OK
    if not args.once:
        watch(meter.lines, args.delay)
    print("\n".join(cut_lines(meter.lines())))
    return OK


class _Meter:
    """Compares CPU times with those of the picture before. `_seen`: by worker, (monotonic time, use)."""

    def __init__(self, data: Path) -> None:
        self._data = data
        self._seen: dict[str, tuple[float, Use]] = {}
        self.rows(take(data))

    def rows(self, shot: Snapshot) -> list[Row]:
        """Return a row for the daemon and each worker that lives."""
        stats = list(all_stats())
        workers = {worker["name"]: worker for worker in shot.workers if worker["alive"]}
        roots = {name: worker["pid"] for name, worker in workers.items()}
        if shot.daemon.running and shot.daemon.file is not None:
            roots = {"daemon": shot.daemon.file.pid} | roots
        jobs = {job["worker"]: job for job in shot.active if job["state"] == "running"}
        out = []
        for name, pid in roots.items():
            kin = [pid] if name == "daemon" else [pid, *(one.pid for one in descendants([pid], stats))]
            use = measure(kin)
            now = time.monotonic()
            before, old = self._seen.get(name, (now, use))
            share = max(0.0, use.cpu_s - old.cpu_s) / (now - before) if now > before else 0.0
            self._seen[name] = (now, use)
            job = jobs.get(name)
            worker = workers.get(name, {})
            health = {"state": worker.get("state"), "serving": worker.get("serving", [])}
            out.append(
                {"name": name, "pid": pid, "cpu": share} | use._asdict() | {"job": job["id"] if job else None} | health
            )
        return out

    def lines(self) -> Iterator[str]:
        """Yield one picture."""
        shot = take(self._data)
        yield f"{show.paint('doing', 'dim')}  {doing(shot)}    {show.paint('disk free', 'dim')}  {show.size(shot.disk_free)}"
        yield f"{show.paint('next', 'dim')}   {advice(shot)}"
        yield show.paint(
            f"{'name':12}{'pid':>9}{'cpu':>7}{'memory':>12}{'processes':>11}{'threads':>9}{'job':>7}  {'state':9}serving",
            "dim",
        )
        for row in self.rows(shot):
            size, job = show.size(row["rss"]), row["job"] or ""
            yield (
                f"{show.one_line(row['name'], 12):12}{row['pid']:>9}{row['cpu']:>7.0%}{size:>12}{row['processes']:>11}"
                f"{row['threads']:>9}{job:>7}  {row['state'] or '':9}{' '.join(row['serving'])}"
            )


def measure(pids: list[int]) -> Use:
    """Return what processes use together; those that ended meanwhile count for nothing."""
    processes, ticks, pages, threads = 0, 0, 0, 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        processes += 1
        ticks += int(fields[11]) + int(fields[12])
        threads += int(fields[17])
        pages += int(fields[21])
    return Use(processes, ticks / TICKS, pages * PAGE, threads)

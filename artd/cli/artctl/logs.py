"""`artctl logs [NAME] [-f] [-n N] [--since TIME]`: shows the log of a worker or the daemon; an engine's includes its server's.

It reads files only, and -f also follows a file that is replaced or truncated by rotation. Exit codes: 0, 5 no such log, 130
interrupted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from artd.cli import daemon_probe, show
from artd.cli.log_times import parse_since, times_of
from artd.cli.outcome import NOT_FOUND, OK, CliError, at_least, near, shared_options
from artd_schema.paths import DATABASE, LOGS
from artd_schema.text.plain import plain
from artd_schema.wire.worker_names import parse_worker

SERVER = "-server"
"""The end of the name of the log of an engine's server, after the engine's own name."""
KINDS = ("trainer", "engine")
POLL_S = 0.2
_BLOCK = 1 << 16
_FIRST = 2000
"""Lines of a file to look for a time in, at first."""


def register(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = sub.add_parser("logs", help="what trainer, engine, gateway or daemon logged", parents=[shared_options()])
    parser.add_argument(
        "name", metavar="NAME", nargs="?", default="",
        help="trainer, engine (of the newest run), gateway, daemon, or a name of `artctl workers` (default: all, by time)",
    )  # fmt: skip
    parser.add_argument(
        "--since", default="", metavar="TIME", help="lines from then on: 90s, 10m, 2h, 1d ago, or an ISO time"
    )
    parser.add_argument("-f", "--follow", action="store_true", help="keep printing new lines")
    parser.add_argument(
        "-n",
        "--lines",
        type=at_least(0),
        default=50,
        help="the last N lines of each file, without NAME of all together (default 50)",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document; with -f one object a line")
    parser.set_defaults(run=run)


@dataclass
class Source:
    """One file under DATA/logs, and how far it has been read."""

    name: str
    path: Path
    at: int = 0
    inode: int = 0

    def tail(self, count: int) -> list[str]:
        """Return the last `count` complete lines, and remember where they end."""
        try:
            with self.path.open("rb") as file:
                self.inode = os.fstat(file.fileno()).st_ino
                text = _last(file, count)
                self.at = file.tell()
        except FileNotFoundError:
            return []
        lines = text.decode(errors="replace").splitlines()
        return lines[-count:] if count > 0 else []

    def news(self) -> list[str]:
        """Return the complete lines written since the last call."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self.inode or found.st_size < self.at:
                    self.inode, self.at = found.st_ino, 0
                file.seek(self.at)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self.at += len(whole)
        return whole.decode(errors="replace").splitlines()


def _last(file: BinaryIO, count: int) -> bytes:
    """Return complete lines from the file's end, at least `count` if there are as many. The file's position is after them."""
    end = start = file.seek(0, os.SEEK_END)
    text = b""
    while start > 0 and text.count(b"\n") <= count:
        size = min(_BLOCK, start)
        start -= size
        file.seek(start)
        text = file.read(size) + text
    whole = text[: text.rfind(b"\n") + 1]
    file.seek(end - (len(text) - len(whole)))
    return whole


def run(args: argparse.Namespace) -> int:
    data = daemon_probe.data_dir(args)
    found = sources(data, args.name)
    entries = _entries(found, args.name, args.lines, args.since)
    labels = _labels([source.name for source in found])
    if args.json and not args.follow:
        rows = [{"source": name, "line": line} for name, line in entries]
        show.document("logs", data, files=[str(source.path) for source in found], lines=rows)
        return OK
    for name, line in entries:
        _print(name, line, labels[name], args.json)
    for name, line in _follow(found) if args.follow else ():
        _print(name, line, labels[name], args.json)
    return OK


def _entries(found: list[Source], name: str, most: int, since: str) -> list[tuple[str, str]]:
    """Return (source, line) of the last lines, or with `since` of all lines from that time on. Lines are sorted by time
    if they come from several files, or if `since` is given."""
    if since:
        start = parse_since(since)
        told = [(when, source.name, line) for source in found for when, line in _since(source, start)]
    else:
        told = [(when, source.name, line) for source in found for when, line in _read_times(source.tail(most))]
    if since or not name:
        told.sort(key=lambda one: one[0])  # stable: lines of one file stay in order
    if not (name or since):
        told = told[-most:] if most else []
    return [(source, line) for _, source, line in told]


def _labels(names: list[str]) -> dict[str, str]:
    """Return the prefix for the lines of each file: nothing if there is one file, else its kind, or its name if several
    files have that kind."""
    kinds = {name: "server" if name.endswith(SERVER) else name.partition("-")[0] for name in names}
    if len(names) == 1:
        return dict.fromkeys(names, "")
    every = list(kinds.values())
    found = {name: kind if every.count(kind) == 1 else name for name, kind in kinds.items()}
    width = max(7, *map(len, found.values()))
    return {name: f"{text:{width}}| " for name, text in found.items()}


def sources(data: Path, name: str) -> list[Source]:
    """Return the files of a name: `trainer` and `engine` mean the newest run's, "" means all files. An engine has a log of its worker
    and one of its server. Raises CliError(NOT_FOUND)."""
    folder = data / LOGS
    logged = {path.stem for path in folder.glob("*.log")}
    workers = sorted(stem.removesuffix(SERVER) for stem in logged)
    own = _newest(workers, name) if name in KINDS else [name]
    own = [each for worker in own for each in (worker, *([worker + SERVER] if worker.startswith("engine") else []))]
    own = own if name else sorted(logged)
    paths = [(each, folder / f"{each}.log") for each in own]
    if not logged & set(own):
        known = sorted({*workers, *(kind for kind in KINDS if _newest(workers, kind))})
        there = f"there is {', '.join(known)}" if known else "there is none yet"
        then = "artctl workers" if (data / DATABASE).exists() else daemon_probe.start_command(data)
        raise CliError(
            NOT_FOUND, f"there is no log {f'{name!r} ' if name else ''}under {folder}{near(name, known)}; {there}", then
        )
    return [Source(each, path) for each, path in paths]


def _newest(workers: Iterable[str], kind: str) -> list[str]:
    """Return the workers of this kind of the run that has the highest id."""
    found = {worker: parse_worker(worker) for worker in workers if worker.startswith(f"{kind}-")}
    newest = max((worker.run for worker in found.values()), default=0)
    return [name for name, worker in found.items() if worker.run == newest]


def _read_times(lines: list[str]) -> list[tuple[float, str]]:
    return list(zip(times_of(lines), lines, strict=True))


def _since(source: Source, since: float) -> list[tuple[float, str]]:
    """Return the lines of a file from a time on, with their times."""
    count = _FIRST
    while True:
        lines = source.tail(count)
        timed = _read_times(lines)
        if len(lines) < count or timed[0][0] < since:
            return [(when, line) for when, line in timed if when >= since]
        count *= 8


def _follow(found: list[Source]) -> Iterator[tuple[str, str]]:
    while True:
        for source in found:
            for line in source.news():
                yield source.name, line
        time.sleep(POLL_S)


def _print(source: str, line: str, label: str, as_json: bool) -> None:
    if as_json:
        show.line({"schema": "artctl.logline/1", "source": source, "line": line})
    else:
        print((show.paint(label, "dim") if label else "") + plain(line.expandtabs()), flush=True)

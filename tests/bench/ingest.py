"""Durable trajectories a second: `python -m tests.bench.ingest [--json] [--seconds S] [--only rate|flood]`.

A real daemon process, artd_client over ZeroMQ, by value, one trajectory per submit, all ingest rules on; a round is
counted by its acknowledgements and checked by the rows after kill -9. Load comes from processes of its own. A raw
fdatasync rate stands beside each round, because it bounds what is possible. fsyncs are counted by strace, where it may
trace, in a round of their own. Afterwards the daemon rests, and its CPU time and memory are read from /proc. `flood`: how long
the small submits of one process take while another one floods with large bodies, and the daemon's peak memory then.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from artd_client import Client, Turn
from tests.bench import flood
from tests.bench.report import Report, parser
from tests.daemon.rig import ROOT, SPEC, VOCAB, Rig
from tests.daemon.rig import rig as new_rig

SIZES = {"512B": 512, "32KiB": 32 * 1024}
IN_FLIGHT = (1, 64)
IDLE_S = 20.0
SETTLE_S = 12.0  # the last WAL checkpoint, and what else the load leaves behind
RUN = flood.RUN
FLOOD_BODY = 8 << 20
FLOOD_IN_FLIGHT = 64
QUEUES = Path(__file__).with_name("peers") / "queues.py"
RATE_S = 3.0  # as there
PEER_ROUNDS = 3
SPEC_OF_BENCH = SPEC | {"group_size": 8, "groups_per_step": 64, "group_timeout_s": 3600.0}


def make_turn(size: int) -> Turn:
    """A turn whose body, msgpack list[Turn], has about `size` bytes: half of it prompt and completion, the rest raw."""
    tokens = max(size // 24, 4)
    ids = array("i", [i % VOCAB for i in range(tokens)]).tobytes()
    logprobs = array("f", [-0.5] * tokens).tobytes()
    raw = b"x" * max(0, size - 3 * 4 * tokens - 60)
    return Turn(prompt_ids=ids, token_ids=ids, logprobs=logprobs, raw=raw)


# ---- one process of load --------------------------------------------------------------------------------------------


async def load(data: str, size: int, in_flight: int, seconds: float, name: str) -> int:
    """Submit for so many seconds; how many were acknowledged in that time."""
    turn, numbers, done = make_turn(size), itertools.count(), 0

    async def stream() -> None:
        nonlocal done
        while time.monotonic() < end:
            number = next(numbers)
            reward = float(number % 8)
            await run.submit(f"{name}-{number // 8}", reward, turns=[turn], key=f"{name}-{number}", metrics={"a": 1.0})
            done += 1

    async with Client(data) as client:
        run = await client.run(RUN)
        end = time.monotonic() + seconds
        await asyncio.gather(*(stream() for _ in range(in_flight)))
    return done


def spawn_load(data: Path, size: int, in_flight: int, seconds: float, name: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "tests.bench.ingest",
        "--load",
        str(data),
        str(size),
        str(in_flight),
        str(seconds),
        name,
    ]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


def round_of(rig: Rig, size: int, in_flight: int, seconds: float, name: str) -> tuple[int, float]:
    """(acknowledged, acknowledged a second) with `in_flight` in all, from up to two processes."""
    processes = min(2, in_flight)
    started = [
        spawn_load(rig.data, size, in_flight // processes, seconds, f"{name}-{number}") for number in range(processes)
    ]
    done = sum(int(process.communicate(timeout=seconds + 60)[0]) for process in started)
    return done, done / seconds


# ---- what is measured -----------------------------------------------------------------------------------------------


def raw_fdatasync(folder: Path, seconds: float = 0.5) -> float:
    """4 KiB overwrites, each with fdatasync, a second."""
    path, block, count = folder / "raw", b"x" * 4096, 0
    with path.open("wb", buffering=0) as file:
        file.write(block)
        os.fsync(file.fileno())
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            os.pwrite(file.fileno(), block, 0)
            os.fdatasync(file.fileno())
            count += 1
    path.unlink()
    return count / seconds


def cpu_seconds(pid: int) -> float:
    """CPU time of every thread of a process so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


def rss_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024


async def create(rig: Rig) -> None:
    async with Client(rig.data) as client:
        run = await client.run(RUN, model=rig.model, **SPEC_OF_BENCH)
        await run.wait(0, timeout=30)
        await run.pause("nothing is to be trained meanwhile")


def count_rows(rig: Rig) -> int:
    return int(rig.one("SELECT count(*) FROM trajectory"))


def measure(report: Report, seconds: float) -> None:
    with new_rig() as rig:
        rig.start()
        asyncio.run(create(rig))
        acknowledged = 0
        for (label, size), in_flight in itertools.product(SIZES.items(), IN_FLIGHT):
            report.add(f"raw fdatasync before {label} x {in_flight}", raw_fdatasync(rig.root), "/s")
            done, rate = round_of(rig, size, in_flight, seconds, f"{label}-{in_flight}")
            acknowledged += done
            goal = 8000.0 if (label, in_flight) == ("512B", 64) else None
            report.add(f"durable trajectories, {label} x {in_flight} in flight", rate, "/s", goal)
        assert rig.process is not None
        time.sleep(SETTLE_S)
        before = cpu_seconds(rig.process.pid)
        time.sleep(IDLE_S)
        spent = cpu_seconds(rig.process.pid) - before
        report.add("idle daemon: CPU", 100 * spent / IDLE_S, "%", 0.5, "<=")
        report.add("idle daemon: resident", rss_mib(rig.process.pid), "MiB", 80, "<=")
        rig.kill()
        missing = acknowledged - count_rows(rig)
        report.add("acknowledged and not there after kill -9", missing, "rows", 0, "<=")


def beside(report: Report, python: Path, seconds: float) -> None:
    """artd and three queues that are a file, each at its most durable, in turns; the peers put one after the other, as their
    only way is (a put returns when it is durable)."""
    with new_rig() as rig, tempfile.TemporaryDirectory(prefix="artd-peers.") as folder:
        rig.start()
        asyncio.run(create(rig))
        found: dict[str, list[float]] = {}
        for turn in range(PEER_ROUNDS):
            found.setdefault("artd x 64", []).append(round_of(rig, 512, 64, seconds, f"peer-{turn}")[1])
            found.setdefault("artd x 1", []).append(round_of(rig, 512, 1, seconds, f"alone-{turn}")[1])
            for system in ("huey", "persist-queue", "litequeue"):
                place = Path(folder) / f"{system}-{turn}"
                place.mkdir()
                command = [str(python), str(QUEUES), system, "rate", str(place)]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.setdefault(system, []).append(int(done.stdout.split()[-1]) / RATE_S)
        rig.kill()
    for system, rates in found.items():
        report.add(f"in turns, 512B, median of {PEER_ROUNDS}: {system}", statistics.median(rates), "/s")


def peak_mib(pid: int) -> float:
    """The most memory that a process has had resident."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def flooded(report: Report, seconds: float) -> None:
    """Small submits alone, and while another process keeps 64 bodies of 8 MiB under way."""
    with new_rig() as rig:
        rig.start()
        asyncio.run(create(rig))
        alone = flood.spawn("times", rig.data, SIZES["512B"], 1, seconds, "alone").communicate(timeout=seconds + 60)[0]
        before = rss_mib(rig.pid)
        flooding = flood.spawn("flood", rig.data, FLOOD_BODY, FLOOD_IN_FLIGHT, seconds + 4, "flood")
        time.sleep(2.0)
        beside = flood.spawn("times", rig.data, SIZES["512B"], 1, seconds, "small").communicate(timeout=seconds + 120)[
            0
        ]
        done = int(flooding.communicate(timeout=seconds + 120)[0])
        for name, found in (("alone", json.loads(alone)), ("beside a flood", json.loads(beside))):
            report.add(f"small submit {name}: median", statistics.median(found), "ms")
            report.add(f"small submit {name}: largest of {len(found)}", max(found), "ms")
        delay = statistics.median(json.loads(beside)) - statistics.median(json.loads(alone))
        report.add("delay of a small submit by the flood, median", delay, "ms", 50, "<=")
        report.add("the flood itself, bodies of 8 MiB", done / (seconds + 4), "/s")
        report.add("daemon: resident before", before, "MiB")
        report.add("daemon: peak", peak_mib(rig.pid), "MiB")
        rig.kill()


def count_syncs(report: Report, seconds: float) -> None:
    """fsync and fdatasync calls of the whole daemon for each trajectory, at 512 B x 64."""
    strace = shutil.which("strace")
    if strace is None:
        print("fsyncs are not counted: there is no strace here", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder, new_rig() as rig:
        trace = Path(folder) / "trace"
        options = ["-f", "--seccomp-bpf", "-qq", "-e", "trace=fsync,fdatasync", "-e", "signal=none", "-o", str(trace)]
        rig.start(under=[strace, *options])
        asyncio.run(create(rig))
        before = len(trace.read_text().splitlines())
        done, _ = round_of(rig, SIZES["512B"], 64, seconds, "syncs")
        calls = len(trace.read_text().splitlines()) - before
        report.add("fsyncs per trajectory, 512B x 64 in flight", calls / done, "", 0.05, "<=")


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=5.0, help="length of each round")
    arguments.add_argument(
        "--load", nargs=5, help="(internal) be one process of load: DATA SIZE IN_FLIGHT SECONDS NAME"
    )
    arguments.add_argument("--peers", type=Path, help="an interpreter with peers/requirements.txt: measure beside them")
    arguments.add_argument("--only", choices=("", "rate", "flood"), default="", help="this part alone")
    args = arguments.parse_args()
    if args.load:
        data, size, in_flight, seconds, name = args.load
        print(asyncio.run(load(data, int(size), int(in_flight), float(seconds), name)))
        return 0
    report = Report("ingest")
    if args.peers:
        beside(report, args.peers, RATE_S)
        return report.finish(args.json)
    if args.only in ("", "rate"):
        measure(report, args.seconds)
        count_syncs(report, min(args.seconds, 3.0))
    if args.only in ("", "flood"):
        flooded(report, args.seconds)
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())

"""Reads of a long run: listings, `artctl status`, and submits beside a thousand waiters: `python -m tests.bench.reads [--json]`.

A real daemon on a database with a million trajectories, made by SQL in one transaction. Listings go through `artd_client` over
ZeroMQ, 100 rows each, warm page cache; the waiters live in processes of their own. Goals: the issue's.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from artd_client import Client
from tests.bench.ingest import make_turn
from tests.bench.report import Report, parser
from tests.daemon.rig import ROOT, Rig
from tests.daemon.rig import rig as new_rig

GROUP = 8
ROUNDS = 15
WAITERS, CLIENTS = 1000, 20
SUBMITS = 300
SPEC = {"group_size": GROUP, "groups_per_step": 64, "group_timeout_s": 3600.0, "row_length": 64, "drop_longer": True}
LISTINGS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("trajectories", {}),
    ("trajectories of the run", {"run": "bench"}),
    ("trajectories in one state", {"states": ("queued",)}),
    ("trajectories of the run in one state", {"run": "bench", "states": ("queued",)}),
    ("trajectories of the run, from the first on", {"run": "bench", "after": 0}),
    ("trajectories of the run, from the middle back", {"run": "bench", "before": 500_000}),
    ("groups of the run in one state", {"run": "bench", "states": ("discarded",)}),
    ("events of the run", {"run": "bench"}),
)
WAIT = """
import asyncio, sys
from artd_client import Client
async def main():
    async with Client(sys.argv[1], timeout=120) as client:
        run = await client.run("bench")
        waits = [asyncio.ensure_future(run.wait(10**6, timeout=600)) for _ in range(int(sys.argv[2]))]
        await asyncio.sleep(2)
        print("waiting", flush=True)
        await asyncio.gather(*waits)
asyncio.run(main())
"""


def fill(database: Path, trajectories: int) -> None:
    """Rows of discarded groups, every tenth one of an evaluation, as if they had been submitted now."""
    now = int(time.time() * 1000)
    with contextlib.closing(sqlite3.connect(database, isolation_level=None)) as c:
        c.execute("PRAGMA synchronous = OFF")
        (run,) = c.execute("SELECT id FROM run").fetchone()
        c.executescript(f"""
            BEGIN;
            CREATE TEMP TABLE n AS WITH RECURSIVE i (x) AS (SELECT 0 UNION ALL SELECT x + 1 FROM i LIMIT {trajectories})
              SELECT x, x / {GROUP} + 1 AS g, (x / {GROUP}) % 10 = 0 AS held FROM i;
            INSERT INTO trajectory_group (id, run_id, name, split, state, reason, size, deadline, created)
              SELECT g, {run}, 'old-' || g, iif(held, 'eval', 'train'), iif(held, 'sealed', 'discarded'),
              iif(held, '', 'zero_variance'), {GROUP}, {now}, {now} FROM n GROUP BY g;
            INSERT INTO trajectory (id, run_id, group_id, key, content, digest, reward, split, state, reason, tokens, created)
              SELECT x + 1, {run}, g, 'old-' || x, printf('%064d', x), printf('%064d', x), 1.0, iif(held, 'eval', 'train'),
              iif(held, 'queued', 'discarded'), iif(held, '', 'zero_variance'), 20, {now} FROM n;
            INSERT INTO trajectory_data (trajectory_id, metrics, body)
              SELECT x + 1, CAST('{{"metrics":{{}},"metadata":{{}}}}' AS BLOB), zeroblob(300) FROM n;
            INSERT INTO event (at, run, kind, ref, data)
              SELECT {now}, 'bench', 'trajectory.submitted', x + 1, CAST('{{"count":1}}' AS BLOB) FROM n;
            COMMIT;
        """)


def median_ms(times: list[float]) -> float:
    return 1000 * statistics.median(times)


async def listings(data: Path, report: Report) -> None:
    async with Client(data, timeout=120) as client:
        for name, asked in LISTINGS:
            what, times = name.split()[0], []
            for _ in range(ROUNDS + 1):
                began = time.perf_counter()
                rows = await client.rows(what, limit=100, **asked)
                times.append(time.perf_counter() - began)
                assert len(rows) == 100, name
            report.add(f"100 {name}", median_ms(times[1:]), "ms", 20.0, "<=")


def status(data: Path, report: Report) -> None:
    command = [sys.executable, "-m", "artd.cli.ctl", "status", "--data-dir", str(data)]
    times = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        assert subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False).returncode == 0
        times.append(time.perf_counter() - began)
    report.add("artctl status, a new process", median_ms(times[1:]), "ms", 150.0, "<=")


async def submits(data: Path, name: str) -> list[float]:
    """Seconds of each, one after the other, 5 ms apart. The first group stays open, so that no wait is stalled."""
    times, turn = [], make_turn(512)
    async with Client(data, timeout=120) as client:
        run = await client.run("bench")
        await run.submit(f"{name}-open", 0.0, turns=[turn], key=f"{name}-open")
        for number in range(SUBMITS):
            began = time.perf_counter()
            await run.submit(f"{name}-{number // GROUP}", 1.0, turns=[turn], key=f"{name}-{number}")
            times.append(time.perf_counter() - began)
            await asyncio.sleep(0.005)
    return sorted(times)


@contextlib.contextmanager
def waiters(data: Path, rig: Rig) -> Iterator[None]:
    command = [sys.executable, "-c", WAIT, str(data), str(WAITERS // CLIENTS)]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=rig.environment(), stdout=subprocess.PIPE) for _ in range(CLIENTS)
    ]
    try:
        for process in processes:
            assert process.stdout is not None and process.stdout.readline() == b"waiting\n"
        yield
        assert all(process.poll() is None for process in processes), "a wait has ended"
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trajectories", type=int, default=1_000_000)
    args = options.parse_args()
    report = Report(f"reads beside {args.trajectories} trajectories")
    with new_rig() as rig:
        rig.start()
        asyncio.run(prepare(rig))
        rig.stop()
        fill(rig.data / "artd.db", args.trajectories)
        rig.start()
        asyncio.run(listings(rig.data, report))
        status(rig.data, report)
        alone = asyncio.run(submits(rig.data, "alone"))
        report.add("submit, nobody waits, p99", 1000 * alone[int(0.99 * SUBMITS)], "ms")
        with waiters(rig.data, rig):
            beside = asyncio.run(submits(rig.data, "beside"))
        report.add(f"submit, {WAITERS} wait, median", 1000 * statistics.median(beside), "ms")
        report.add(f"submit, {WAITERS} wait, p99", 1000 * beside[int(0.99 * SUBMITS)], "ms", 50.0, "<=")
    return report.finish(args.json)


async def prepare(rig: Rig) -> None:
    async with Client(rig.data, timeout=60) as client:
        run = await client.run("bench", model=rig.model, **SPEC)
        await run.wait(0, timeout=60)


if __name__ == "__main__":
    sys.exit(main())

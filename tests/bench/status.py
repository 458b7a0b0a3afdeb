"""`artctl status` and every listing in a new process, warm page cache: median and 95th percentile of wall time.

    python tests/bench/status.py [--json] [--trajectories 100000]

Goal: 150 ms, median of 20 (the design, section 11). The database is made by hand; the daemon is a held lock.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from artd.datadir import lock
from tests.bench.report import Report, parser
from tests.cli.rows import Made, busy

ROUNDS = 20
GOAL_MS = 150.0
GROUP = 8
LISTINGS = (
    ("runs",), ("jobs",), ("trajectories",), ("groups",), ("batches",), ("metrics",), ("checkpoints",), ("workers",), ("pushes",),
    ("events",), ("job", "3"), ("samples", "--best"), ("samples", "--step", "2"), ("show", "1"),
)  # fmt: skip


def fill(made: Made, trajectories: int) -> None:
    made.connection.execute("BEGIN")
    for number in range(trajectories // GROUP):
        group = made.group(2, f"bench-{number}", "sealed", GROUP)
        for member in range(GROUP):
            made.trajectory(2, group, f"{number}-{member}", body=b"x" * 512)
            made.event("trajectory.submitted", str(member))
    made.connection.execute("COMMIT")


def measure(data: Path, expected: int, *words: str) -> list[float]:
    """Milliseconds of each round of a verb."""
    command = [sys.executable, "-m", "artd.cli.ctl", *words, "--data-dir", str(data)]
    times = []
    for _ in range(ROUNDS + 1):
        started = time.perf_counter()
        code = subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode
        times.append(1000 * (time.perf_counter() - started))
        assert code == expected, f"artctl {words[0]} ended with {code}"
    return times[1:]


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--trajectories", type=int, default=100_000)
    args = options.parse_args()
    report = Report(f"artctl status, {args.trajectories} trajectories, {ROUNDS} rounds")
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        fill(busy(data), args.trajectories)
        for name, expected in (("daemon down", 3), ("daemon up", 0)):
            handle = lock.acquire(data, "bench", 1.0) if expected == 0 else None
            times = measure(data, expected, "status")
            report.add(f"status, {name}, median", statistics.median(times), "ms", GOAL_MS, "<=")
            report.add(f"status, {name}, p95", sorted(times)[int(0.95 * ROUNDS) - 1], "ms")
            if handle is not None:
                handle.close()
        for words in LISTINGS:
            times = measure(data, 0, *words)
            report.add(" ".join(words), statistics.median(times), "ms", GOAL_MS, "<=")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())

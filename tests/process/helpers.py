"""Real process trees for the supervision tests, and what is left of them. Every tree has an instance tag of its own, by which a
test finds and ends all of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from artd.supervise import procfs
from artd.supervise.spawn import Child, spawn
from tests.awake import SOON_S, Awake
from tests.awake import until as until_soon

PYTHON = (sys.executable, "-I", "-S", "-c")
ROOT = Path(__file__).parents[2]

SLEEP = "import time; time.sleep(600)"
SETSID = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0:\n"
    "        time.sleep(600)\n"
    "    os._exit(0)\n"
    "time.sleep(600)"
)
"""A grandchild in a session of its own whose parent is dead: only a subreaper or its tag finds it."""
BARE = (
    "import os, time\n"
    "if os.fork() == 0:\n"
    "    os.setsid()\n"
    "    if os.fork() == 0: os.execve('/bin/sleep', ['sleep', '600'], {})\n"
    "    os._exit(0)\n"
    "os.wait()\n"
    "time.sleep(600)"
)
"""The same without its tags."""
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
GIL = "import ctypes; ctypes.PyDLL(None).sleep(600)"
LEADERLESS = (
    "import ctypes, threading, time\n"
    "threading.Thread(target=time.sleep, args=(600,)).start()\n"
    "ctypes.CDLL(None).pthread_exit(None)"
)
"""Its first thread has ended, so /proc calls it a zombie; another runs on."""
DEAF = (
    "import signal, time\n"
    "for n in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT): signal.signal(n, signal.SIG_IGN)\n"
    "print('deaf', flush=True)\n"
    "time.sleep(600)"
)


def python(program: str) -> tuple[str, ...]:
    return (*PYTHON, program)


def tags(instance: str, *, boot: int = 1, spawn: int = 1, worker: str = "trainer", owner: str = "") -> dict[str, str]:
    """A child's environment with nothing but the tags."""
    values = {"ARTD_INSTANCE": instance, "ARTD_BOOT": str(boot), "ARTD_SPAWN": str(spawn), "ARTD_WORKER": worker}
    return {**values, "ARTD_OWNER": owner} if owner else values


def tagged(instance: str) -> list[procfs.Stat]:
    """Every living process of the instance, guardians included."""
    return [
        stat
        for stat in procfs.all_stats()
        if not stat.dead and procfs.environment(stat.pid).get("ARTD_INSTANCE") == instance
    ]


@contextmanager
def fresh_instance() -> Iterator[str]:
    """An instance id; whatever carries it at the end is killed, so that a red test leaves nothing."""
    instance = uuid.uuid4().hex
    try:
        yield instance
    finally:
        for _ in range(20):
            left = tagged(instance)
            if not left:
                break
            procfs.strike(left, signal.SIGKILL)
            time.sleep(0.02)


def until(condition: Callable[[], object], within_s: float = SOON_S) -> None:
    with Awake() as passed:
        while not condition():
            assert passed.seconds < within_s, f"not within {within_s} s"
            time.sleep(0.01)


@contextmanager
def process(env: dict[str, str], argv: Sequence[str] = ("/bin/sleep", "600")) -> Iterator[procfs.Stat]:
    """A process in a session of its own, as an older boot would have left it (no guardian)."""
    made = subprocess.Popen(argv, env=env, start_new_session=True, stdout=subprocess.DEVNULL)
    try:
        # Until the exec is done, the environment shown is not yet the child's own.
        until(lambda: procfs.environment(made.pid) == env)
        stat = procfs.read_stat(made.pid)
        assert stat is not None
        yield stat
    finally:
        made.kill()
        made.wait()


def gone(instance: str, before: list[procfs.Stat], within_s: float) -> None:
    """Every process of `before` is dead in time, and then nothing carries the tag."""
    dead(before, within_s)
    assert not tagged(instance), "a process that was made meanwhile lives"


def dead(before: list[procfs.Stat], within_s: float) -> None:
    """Every process of `before` is dead in time; fails with who lived, and why.

    Deaths are read from /proc/PID/stat alone: reading environments of a whole machine may itself wait for others.
    """
    began = time.monotonic()
    with Awake() as passed:
        while living := [one for one in before if procfs.alive(procfs.Identity(procfs.boot_id(), one.pid, one.ticks))]:
            if passed.seconds > within_s:
                seen = [f"{stat.pid} {procfs.read_stat(stat.pid)} in {_wait_channel(stat.pid)}" for stat in living]
                raise AssertionError(
                    f"alive after {within_s} s ({time.monotonic() - began:.2f} s by the clock): {seen}"
                )
            time.sleep(0.005)


def _wait_channel(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/wchan").read_text() or "?"
    except OSError as error:
        return f"? ({error.strerror})"


async def ended(child: Child) -> int:
    """Its exit status, once it has ended by itself and all of it is proven dead."""
    await until_soon(lambda: child.exited)
    return await child.kill()


def session_members(session: int) -> list[procfs.Stat]:
    """Processes of a session that can still run; zombies are left out."""
    return [stat for stat in procfs.all_stats() if stat.session == session and not stat.dead]


def start(instance: str, program: str, log: Path, **tag: int | str) -> Child:
    """Spawn a Python program under a guardian, with tags."""
    return spawn("trainer", python(program), tags(instance, **tag), log)


SPAWNER = """
import asyncio, os, signal, sys, time
from pathlib import Path
from tests.process import helpers
async def main():
    instance, log, at_once, *programs = sys.argv[1:]
    # A test run in the background inherits SIGINT as ignored; a daemon in a terminal does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    owner = ":".join(map(str, helpers.procfs.identity()[1:]))
    children = [helpers.start(instance, program, Path(log), owner=owner) for program in programs]
    if at_once == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    for child in children:
        print(child.pid, child.who.ticks, flush=True)
    for child in children:
        await helpers.ended(child)
asyncio.run(main())
"""


@contextmanager
def spawner(instance: str, log: Path, *programs: str, at_once: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A process that plays the daemon: it spawns the programs, prints each guardian's pid and ticks, and waits.

    at_once: it kills itself between spawn and the guardian's first instruction.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SPAWNER, instance, str(log), str(int(at_once)), *programs],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'schema'}"},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

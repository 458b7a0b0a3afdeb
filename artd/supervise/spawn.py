"""Starts one process of a worker under a guardian, ends it, and proves its death.

Owns the write end of the child's death pipe, its pidfd, and the guardian's unreaped zombie. artd reaps the guardian
only after no process of its session lives, because no other process can get the guardian's number before. Every signal
goes to a (pid, start ticks) that was read again. No process inherits the write end of the death pipe.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from artd.net.descriptors import is_scarce
from artd_schema.crashpoint import reach

from . import procfs
from .guardian import ORDER
from .postmortem import TAIL_LINES, read_tail

GUARDIAN = Path(__file__).with_name("guardian.py")
TAGS = ("ARTD_INSTANCE", "ARTD_BOOT", "ARTD_WORKER", "ARTD_SPAWN")
PROOF_S = 15.0
"""How long a killed subtree may take to vanish before artd reports that it does not die: freeing tens of gigabytes, or a GPU's
context, takes seconds on a busy machine."""
LOOK_S = (0.005, 0.1)
"""The first and the longest pause between two looks at the survivors."""


class Undead(Exception):
    """A process outlives SIGKILL. Its worker is broken(pid, state) until the process is gone."""

    def __init__(self, name: str, pid: int, state: str) -> None:
        super().__init__(
            f"process {pid} of worker {name!r} does not die (broken(pid {pid}, state {state})); "
            f"see /proc/{pid}/task/*/stack and the kernel log; start the worker again when it is gone"
        )
        self.name, self.pid, self.state = name, pid, state


@dataclass
class Child:
    """A guardian and its subtree. `session` is the id of the session that the guardian leads (its pid). `log_start` is the size of
    the log before this process wrote to it."""

    name: str
    who: procfs.Identity
    session: int
    log: Path
    log_start: int
    tags: Mapping[str, str]
    _process: subprocess.Popen[bytes]
    _pidfd: int
    _death: int
    _exited: asyncio.Event = field(default_factory=asyncio.Event)
    _code: int | None = None
    _collecting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def pid(self) -> int:
        return self.who.pid

    @property
    def exited(self) -> bool:
        """Whether the guardian has ended; only `kill` proves that the rest of the subtree is dead."""
        return self._exited.is_set()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Return the last lines that this process wrote to its log."""
        return read_tail(self.log, self.log_start, lines)

    def terminate(self) -> None:
        """Send SIGTERM to the main child through the guardian; do nothing if it has ended."""
        self._signal(signal.SIGTERM)

    def trace(self) -> None:
        """Send SIGUSR1 to the main child, which then writes the stack of every thread to its log, or ends."""
        procfs.strike([stat for stat in procfs.all_stats() if stat.ppid == self.pid], signal.SIGUSR1)

    def sever(self) -> None:
        """Order the guardian to kill the whole subtree, and return at once. A second call does nothing."""
        if self._death >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guardian has ended
                os.write(self._death, ORDER)
            os.close(self._death)
            self._death = -1
            self._signal(signal.SIGCONT)

    async def kill(self, within_s: float = PROOF_S) -> int:
        """Kill the subtree if it lives, and prove its death within about `within_s` seconds. It may be called again.

        Returns the exit status of the main child, 128 + n after signal n, -n if signal n killed the guardian. Raises Undead.
        """
        self.sever()
        try:
            await asyncio.wait_for(self._exited.wait(), within_s / 2)
        except TimeoutError:
            await self._kill_around_guardian(within_s / 2)
        return await self._collect(within_s / 2)

    def _signal(self, number: int) -> None:
        # With a code the process is reaped; a lookup error means that it is a zombie. Neither can be signalled.
        if self._code is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    async def _kill_around_guardian(self, within_s: float) -> None:
        """Kill the subtree in place of a guardian that is stuck, or that waits for a process that cannot die."""
        below = procfs.descendants([self.pid], procfs.all_stats())
        procfs.strike(below, signal.SIGKILL)
        self._signal(signal.SIGKILL)
        try:
            await asyncio.wait_for(self._exited.wait(), within_s)
        except TimeoutError:
            stat = procfs.read_stat(self.pid)
            raise Undead(self.name, self.pid, stat.state if stat else "?") from None
        await _prove(self.name, lambda: [stat for stat in below if _lives(stat)], within_s)

    async def _collect(self, within_s: float) -> int:
        async with self._collecting:
            if self._code is None:
                await _prove(self.name, self._survivors, within_s)
                self._code = self._process.wait()
                os.close(self._pidfd)
                if self._death >= 0:
                    os.close(self._death)
                    self._death = -1
            return self._code

    def _survivors(self) -> list[procfs.Stat]:
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        orderly = result is not None and result.si_code == os.CLD_EXITED
        stats = list(procfs.all_stats())
        found = [stat for stat in stats if stat.session == self.session]
        if not orderly:
            # A killed guardian proved nothing, and only its tags identify a process that made its own session.
            found += [stat for stat in stats if self.tags and self.tags.items() <= procfs.environment(stat.pid).items()]
            found += procfs.descendants([stat.pid for stat in found], stats)
        return [stat for stat in dict.fromkeys(found) if not stat.dead]

    def _on_exit(self, woken: Callable[[], None] | None) -> None:
        asyncio.get_running_loop().remove_reader(self._pidfd)
        self._exited.set()
        if woken is not None:
            woken()


def _lives(stat: procfs.Stat) -> bool:
    now = procfs.read_stat(stat.pid)
    return now is not None and now.ticks == stat.ticks and not now.dead


async def _prove(name: str, survivors: Callable[[], Iterable[procfs.Stat]], within_s: float) -> None:
    deadline = time.monotonic() + within_s
    pause = LOOK_S[0]
    while left := await _look(survivors):
        procfs.strike(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise Undead(name, left[0].pid, left[0].state)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LOOK_S[1])


async def _look(survivors: Callable[[], Iterable[procfs.Stat]]) -> list[procfs.Stat]:
    """Return the survivors. Without a free file descriptor it cannot look, so it waits for one."""
    while True:
        try:
            return await asyncio.to_thread(lambda: list(survivors()))  # each look reads all of /proc
        except OSError as error:
            if not is_scarce(error):
                raise
        await asyncio.sleep(0.2)


def guard_command(death: int, argv: Sequence[str]) -> list[str]:
    """Return the command that runs argv under a guardian, which must inherit `death`, the read end of its death pipe."""
    return [sys.executable, "-I", "-S", str(GUARDIAN), str(death), "--", *argv]


@contextlib.contextmanager
def death_pipe() -> Iterator[int]:
    """Yield the read end of a pipe for `guard_command`. The command ends with the `with` block, or with this process."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def spawn(
    name: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    log: Path,
    *,
    cwd: Path = Path("/"),
    fds: Sequence[int] = (),
    woken: Callable[[], None] | None = None,
) -> Child:
    """Start argv under a guardian; call it in the event loop's thread.

    The process appends its output to `log` (mode 0600). It and the guardian inherit `fds`. `cwd` is never the user's folder, so that
    `-m` finds no stray module there. The loop calls `woken` when the guardian has ended.
    Raises OSError when no process can be made or the log cannot be opened.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        log_start = os.fstat(output).st_size
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                guard_command(reading, argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                cwd=cwd,
                close_fds=True,
                pass_fds=(reading, *fds),
                start_new_session=True,
            )
        except BaseException:
            os.close(writing)
            raise
        finally:
            os.close(reading)
    finally:
        os.close(output)
    reach("spawn.started")
    try:
        who, pidfd = procfs.identity(process.pid), os.pidfd_open(process.pid)
    except BaseException:
        os.close(writing)
        process.wait()
        raise
    child = Child(
        name=name,
        who=who,
        session=process.pid,
        log=log,
        log_start=log_start,
        tags={key: env[key] for key in TAGS} if all(key in env for key in TAGS) else {},
        _process=process,
        _pidfd=pidfd,
        _death=writing,
    )
    asyncio.get_running_loop().add_reader(pidfd, child._on_exit, woken)
    return child

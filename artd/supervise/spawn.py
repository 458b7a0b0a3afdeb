"""One process of a worker: made under a guardian, waited for, ended, and proven dead.

Owner of: the write end of the child's death pipe, its pidfd, and the guardian's unreaped zombie. Invariants: the guardian
is reaped only after nothing of its session lives, because its number cannot be given to a stranger before; every signal
goes to a (pid, start ticks) that was read again; the death pipe's write end is inherited by nobody.
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
LOOK_S = (0.005, 0.1)
"""Between two looks at who is left: the first, and the longest."""
"""How long a killed subtree may take to be gone before it is reported as not dying: giving back tens of gigabytes, or a
GPU's context, takes seconds on a busy machine."""


class Undead(Exception):
    """A process outlives SIGKILL: its worker is broken(pid, state) until it is gone."""

    def __init__(self, name: str, pid: int, state: str) -> None:
        super().__init__(
            f"process {pid} of worker {name!r} does not die (broken(pid {pid}, state {state})); "
            f"see /proc/{pid}/task/*/stack and the kernel log; start the worker again when it is gone"
        )
        self.name, self.pid, self.state = name, pid, state


@dataclass
class Child:
    """A guardian and its subtree. session: id of the session that the guardian leads (its pid); log_start: size of the log
    before this process wrote to it."""

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
        """Whether the guardian has ended (the proof that nothing else lives comes with `kill`)."""
        return self._exited.is_set()

    def tail(self, lines: int = TAIL_LINES) -> str:
        """Last lines that this process wrote to its log."""
        return read_tail(self.log, self.log_start, lines)

    def terminate(self) -> None:
        """SIGTERM for the main child, through the guardian; no effect when it has ended."""
        self._signal(signal.SIGTERM)

    def trace(self) -> None:
        """SIGUSR1 for the main child, which is to tell its log where every thread is, or else ends."""
        procfs.strike([stat for stat in procfs.all_stats() if stat.ppid == self.pid], signal.SIGUSR1)

    def sever(self) -> None:
        """Order the guardian to SIGKILL the whole subtree. Returns at once; may be called again."""
        if self._death >= 0:
            with contextlib.suppress(BrokenPipeError):  # the guardian has ended
                os.write(self._death, ORDER)
            os.close(self._death)
            self._death = -1
            self._signal(signal.SIGCONT)

    async def kill(self, within_s: float = PROOF_S) -> int:
        """SIGKILL the subtree, if it lives, and prove it dead within about `within_s` seconds; may be called again. Returns the exit
        status: the main child's, 128 + n after signal n, -n if the guardian got signal n. Raises Undead."""
        self.sever()
        try:
            await asyncio.wait_for(self._exited.wait(), within_s / 2)
        except TimeoutError:
            await self._kill_around_guardian(within_s / 2)
        return await self._collect(within_s / 2)

    def _signal(self, number: int) -> None:
        # Without the pidfd the process is reaped, without a pidfd's target it is a zombie: nothing is left to signal.
        if self._code is None:
            try:
                signal.pidfd_send_signal(self._pidfd, number)
            except ProcessLookupError:
                return

    async def _kill_around_guardian(self, within_s: float) -> None:
        """The guardian does not do it (stuck, or waiting for one that cannot die): take its part."""
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
            # A killed guardian proved nothing: whoever made a session of his own is known by his tag only.
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
    while left := await _seen(survivors):
        procfs.strike(left, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise Undead(name, left[0].pid, left[0].state)
        await asyncio.sleep(pause)
        pause = min(2 * pause, LOOK_S[1])


async def _seen(survivors: Callable[[], Iterable[procfs.Stat]]) -> list[procfs.Stat]:
    """Who lives. Without a file descriptor left nobody can tell, which passes."""
    while True:
        try:
            return await asyncio.to_thread(lambda: list(survivors()))  # each look reads all of /proc
        except OSError as error:
            if not is_scarce(error):
                raise
        await asyncio.sleep(0.2)


def guarded(death: int, argv: Sequence[str]) -> list[str]:
    """The command that runs argv under a guardian. death: the read end of its death pipe, to be inherited."""
    return [sys.executable, "-I", "-S", str(GUARDIAN), str(death), "--", *argv]


@contextlib.contextmanager
def death_pipe() -> Iterator[int]:
    """The read end of a pipe for `guarded`. What runs by it is ended when the block is left, or with this process."""
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

    log: output is appended (0600). fds: inherited, by the guardian too. cwd: never the user's, so that `-m` finds no stray module there. woken: called in the
    loop when the guardian has ended. Raises OSError when no process can be made or the log cannot be opened.
    """
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        log_start = os.fstat(output).st_size
        reading, writing = os.pipe2(os.O_CLOEXEC)
        try:
            process = subprocess.Popen(
                guarded(reading, argv),
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

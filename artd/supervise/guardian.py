"""Runs one worker under a guardian: a small process between the daemon and the worker that ends the worker's whole
subtree.

The daemon runs it as `python -I -S guardian.py DEATH_FD -- ARGV...` in a session of its own. DEATH_FD is the read end
of a pipe whose only write end the daemon holds: a byte in it means that the daemon wants the subtree dead, its
end-of-file that the daemon is gone.

- A byte, end-of-file, or a second SIGTERM: the guardian sends SIGKILL to every descendant until none is left, then
  exits.
- End-of-file before the main child started: the guardian does not start it at all.
- The first SIGTERM: the guardian passes it on to the main child only.
- The main child ended: the guardian kills the processes it left behind, then exits with its status (128 + n after
  signal n).
- At last, when the daemon is gone: the guardian sends SIGKILL to all processes with the tags of the same daemon,
  because their
  own guardian may have been killed with the daemon. It spares other guardians, which do their own work.

Stand-alone (standard library only, no threads, no fork without exec). The guardian is a subreaper, so no descendant
escapes by a session of its own or by the death of its parent. Its own parent-death signal never kills it (it is
SIGCONT, which only wakes a guardian that somebody had stopped). It signals a process that is no descendant only if that
process has this very daemon's tags and that daemon is dead. `procfs` reuses the readers below, so that there is one
parser of /proc/PID/stat.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple, NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LINGER_S = 30.0
"""How long a guardian waits for descendants that do not die of SIGKILL (uninterruptible sleep, a driver's teardown)."""
KIN_S = 5.0
"""How long the final search for processes of killed guardians may take."""
DEAD = ("Z", "X", "x")
KIN = ("ARTD_INSTANCE", "ARTD_BOOT", "ARTD_OWNER")
"""Tags that the processes of one daemon share. ARTD_OWNER is that daemon, as PID:TICKS."""
ORDER = b"k"
"""The byte that a living daemon writes into the pipe before it closes it, because it wants the subtree dead."""


class Stat(NamedTuple):
    """One line of /proc/PID/stat. `state` is that of the first thread: R, S, D, T, t, Z, X ... `ticks` is the start time in clock
    ticks since boot. `threads` counts threads that have not ended, and the first one until somebody collects the process."""

    pid: int
    ppid: int
    session: int
    state: str
    ticks: int
    threads: int = 1

    @property
    def dead(self) -> bool:
        """Whether the whole process is dead. After the first thread has ended, others may still run, or close the GPU's files."""
        return self.state in DEAD and self.threads <= 1


def read_stat(pid: int) -> Stat | None:
    """Return the line of a process, None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            line = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The command's name may contain spaces and brackets, so count the fields from the last bracket.
    fields = line[line.rindex(b")") + 2 :].split()
    return Stat(pid, int(fields[1]), int(fields[3]), fields[0].decode(), int(fields[19]), int(fields[17]))


def all_stats() -> Iterator[Stat]:
    """Yield every process that this /proc shows."""
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := read_stat(int(name))) is not None:
            yield stat


def read_environment(pid: int) -> dict[str, str]:
    """Return the environment of a process at its exec; empty if it is gone, unreadable or overwritten."""
    raw = _environ(f"/proc/{pid}")
    if not raw and (stat := read_stat(pid)) is not None and stat.state in DEAD and not stat.dead:
        raw = next(filter(None, map(_environ, _threads(pid))), b"")
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if item)
    return {os.fsdecode(key): os.fsdecode(value) for key, _, value in pairs}


def _environ(folder: str) -> bytes:
    try:
        with open(f"{folder}/environ", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""


def _threads(pid: int) -> Iterator[str]:
    """Yield the /proc folders of all threads but the first. A first thread that has ended has no memory; the others may have."""
    try:
        yield from (f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task") if name != str(pid))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return


def descendants(roots: Iterable[int], stats: Iterable[Stat]) -> list[Stat]:
    """Return all processes below `roots`, without the roots, parents before their children."""
    children: dict[int, list[Stat]] = {}
    for stat in stats:
        children.setdefault(stat.ppid, []).append(stat)
    found: list[Stat] = []
    level = list(roots)
    while level:
        below = [stat for pid in level for stat in children.get(pid, ())]
        found += below
        level = [stat.pid for stat in below]
    return found


def signal_exact(pid: int, ticks: int, number: int) -> bool:
    """Signal the process (pid, ticks), and never another one that took over its number. Returns False if it is gone.

    It reads the start time again after it has opened a pidfd: if the time is equal, the pidfd refers to that process.
    """
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        stat = read_stat(pid)
        if stat is None or stat.ticks != ticks:
            return False
        signal.pidfd_send_signal(pidfd, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}, {value}): {os.strerror(code)}")


def _say(text: str) -> None:
    try:
        os.write(2, f"artd guardian: {text}\n".encode(errors="replace"))
    except OSError:
        # The log may be on a full disk; a guardian that dies of that leaves its subtree alive.
        return


def _execute(command: list[str], guardian: int) -> NoReturn:
    """Become the command, in the forked child: take a process group, reset the signals, and die with the guardian."""
    try:
        os.setpgid(0, 0)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if signal.getsignal(number) not in (signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(128 + signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execvp(command[0], command)
    except OSError as error:
        _say(f"cannot execute {command[0]!r}: {error.strerror}")
    finally:
        os._exit(127)


def _start(command: list[str]) -> int:
    guardian = os.getpid()
    # No handler may run in the child before the child has reset its signals.
    before = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    pid = os.fork()
    if pid == 0:
        _execute(command, guardian)
    try:
        # Both processes set the group, because a signal to the child's group must never reach the guardian.
        os.setpgid(pid, pid)
    except (PermissionError, ProcessLookupError):
        # The child has already executed the command or ended, so it has set its group itself.
        pass
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _reap(main: int, status: int | None) -> tuple[int | None, bool]:
    """Collect every ended child. Returns (exit status of the main child or None, whether any child is left)."""
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status, False
        if pid == 0:
            return status, True
        if pid == main:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def _end_all(main: int, status: int | None) -> int:
    """Send SIGKILL to all descendants until none lives. Returns the exit status.

    The guardian is the subreaper, so without children it has no descendants.
    """
    deadline = time.monotonic() + LINGER_S
    pause = 0.002
    while True:
        status, left = _reap(main, status)
        if not left:
            break
        living = [stat for stat in descendants([os.getpid()], all_stats()) if not stat.dead]
        if time.monotonic() > deadline:
            _say(f"not dead {LINGER_S:.0f} s after SIGKILL: " + ", ".join(f"{s.pid} (state {s.state})" for s in living))
            break
        for stat in living:
            try:
                signal_exact(stat.pid, stat.ticks, signal.SIGKILL)
            except PermissionError:
                _say(f"may not signal process {stat.pid}")
        time.sleep(pause)
        pause = min(pause * 2, 0.05)
    return 128 + signal.SIGKILL if status is None else status


def _word(death: int) -> str:
    """Read what the daemon says through the pipe. Returns "" for nothing, "order", or "gone" for end-of-file."""
    poll = select.poll()
    poll.register(death, select.POLLIN)
    if not poll.poll(0):
        return ""
    return "order" if os.read(death, len(ORDER)) else "gone"


def _watch(death: int, wake: int, main: int, terms: list[int]) -> tuple[int, bool]:
    """Wait until the subtree is dead. Returns (exit status, whether the daemon is gone)."""
    poll = select.poll()
    poll.register(death, select.POLLIN)
    poll.register(wake, select.POLLIN)
    status: int | None = None
    passed_on = False
    while True:
        ready = [fd for fd, _ in poll.poll()]
        if wake in ready:
            os.read(wake, 4096)
        status, _ = _reap(main, status)
        word = _word(death)
        if status is not None or word or len(terms) > 1:
            code = _end_all(main, status)
            return code, (word or _word(death)) == "gone"
        if terms and not passed_on:
            os.kill(main, signal.SIGTERM)
            passed_on = True


def _end_kin() -> None:
    """Wait for the daemon's death, then send SIGKILL to the remaining processes of its other workers."""
    mark = {key: os.environ.get(key, "") for key in KIN}
    pid, _, ticks = mark["ARTD_OWNER"].partition(":")
    if not all(mark.values()) or not (pid.isdecimal() and ticks.isdecimal()):
        return
    deadline = time.monotonic() + KIN_S
    # A process closes its files, and so the pipe, a moment before it is dead.
    while (owner := read_stat(int(pid))) is not None and owner.ticks == int(ticks) and not owner.dead:
        if time.monotonic() > deadline:
            return
        time.sleep(0.005)
    while left := _kin(mark):
        if time.monotonic() > deadline:
            _say("not dead after SIGKILL: " + ", ".join(f"{stat.pid} (state {stat.state})" for stat in left))
            return
        for stat in left:
            try:
                signal_exact(stat.pid, stat.ticks, signal.SIGKILL)
            except PermissionError:
                _say(f"may not signal process {stat.pid}")
        time.sleep(0.01)


def _kin(mark: dict[str, str]) -> list[Stat]:
    """Return the living processes with these tags and their descendants, without guardians."""
    stats = list(all_stats())
    tagged = [stat for stat in stats if mark.items() <= read_environment(stat.pid).items()]
    found = dict.fromkeys([*tagged, *descendants([stat.pid for stat in tagged], stats)])
    return [stat for stat in found if not stat.dead and not _is_guardian(stat.pid)]


def _is_guardian(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False
    return os.fsencode(sys.argv[0]) in words[:4]


def main(arguments: list[str]) -> int:
    """Start and guard one command. Returns its exit status."""
    if len(arguments) < 3 or arguments[1] != "--":
        _say("usage: guardian.py DEATH_FD -- ARGV...")
        return 64
    death, command = int(arguments[0]), arguments[2:]
    os.set_inheritable(death, False)
    if os.getsid(0) != os.getpid():
        os.setsid()
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    terms: list[int] = []
    wake, woken = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, lambda number, _: terms.append(number))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    if _word(death):
        return 128 + signal.SIGKILL
    status, orphaned = _watch(death, wake, _start(command), terms)
    if orphaned:
        _end_kin()
    return status


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))

"""The packing child as a process: started under a guardian, watched, and ended when it stands still or takes too long.

Owner of: the child's process. Invariants: it does not outlive the daemon; a child that is stopped, hangs in a read or turns for ever
is ended, and its failure is nobody's fault.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO

import anyio
import anyio.to_thread
import msgspec

from artd.supervise import procfs
from artd.supervise.spawn import PROOF_S, death_pipe, guard_command
from artd_schema.codec import UNREADABLE, digest

from .child import PackFailure, PackRequest, PackResult

STALL_S = 60.0
"""Without a tick of processor time and a byte read or written."""
DEADLINE_S = 3600.0
CRASHES = tuple(128 + number for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGILL))
"""Exit statuses of a guardian whose child its own code has killed. SIGBUS may be the disk's, SIGKILL is memory's."""


async def run_child(request: PackRequest, stall_s: float = STALL_S) -> PackResult | PackFailure:
    """Exec `python -m artd.packing.child` for one batch. It is ended after `stall_s` seconds in which it does nothing."""
    try:
        with (
            death_pipe() as death,
            tempfile.TemporaryFile() as question,  # a pipe would break when the child dies early
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
        ):
            question.write(msgspec.json.encode(request))
            question.seek(0)
            process = _start(death, question, out, errors)
            ended = await _watch(process, stall_s)
            return PackFailure(error=ended, kind="stalled") if ended else _answer(process.returncode, out, errors)
    except OSError as error:  # no more processes, memory or descriptors: as with a worker, another time
        return PackFailure(error=f"no packer could be started: {error}")


def _start(death: int, question: IO[bytes], out: IO[bytes], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    command = guard_command(death, [sys.executable, "-m", "artd.packing.child"])
    return subprocess.Popen(
        command, stdin=question, stdout=out, stderr=errors, pass_fds=(death,), start_new_session=True
    )


def _answer(status: int, out: IO[bytes], errors: IO[bytes]) -> PackResult | PackFailure:
    out.seek(0)
    said = out.read()
    try:
        return msgspec.json.decode(said, type=PackResult | PackFailure)
    except UNREADABLE:
        errors.seek(0)
        tail = errors.read().decode(errors="replace").strip()[-2000:]
        error = f"the packer ended with status {status}: {tail or digest(said)}"
        return PackFailure(error=error, kind="code" if status in CRASHES else "io")


async def _watch(process: subprocess.Popen[bytes], stall_s: float) -> str:
    """Wait for the process's end; why it was ended, "" when it ended by itself."""
    loop = asyncio.get_running_loop()
    began = moved = loop.time()
    spent: list[tuple[int, bytes]] = []
    why = ""
    with _exit_of(process.pid) as exited:
        try:
            while not exited.is_set() and not why:
                with anyio.move_on_after(min(1.0, stall_s / 4)):
                    await exited.wait()
                if (now := await anyio.to_thread.run_sync(_spent, process.pid)) != spent:
                    spent, moved = now, loop.time()
                if loop.time() - moved > stall_s:
                    why = f"the packer did nothing for {stall_s:.0f} s and was ended"
                elif loop.time() - began > DEADLINE_S:
                    why = f"the packer did not end within {DEADLINE_S:.0f} s and was ended"
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(PROOF_S):
                while not exited.is_set():
                    procfs.strike(_below(process.pid), signal.SIGKILL)
                    with anyio.move_on_after(0.1):
                        await exited.wait()
            if exited.is_set():
                process.wait()
    return why if not why or process.returncode is not None else f"{why}, but does not die: see /proc/{process.pid}"


@contextmanager
def _exit_of(pid: int) -> Iterator[asyncio.Event]:
    """Set when the process has ended and can be waited for."""
    exited, loop, pidfd = asyncio.Event(), asyncio.get_running_loop(), os.pidfd_open(pid)
    loop.add_reader(pidfd, exited.set)
    try:
        yield exited
    finally:
        loop.remove_reader(pidfd)
        os.close(pidfd)


def _below(guardian: int) -> list[procfs.Stat]:
    return procfs.descendants([guardian], procfs.all_stats())


def _spent(guardian: int) -> list[tuple[int, bytes]]:
    """Processor time and bytes read and written, of what is below the guardian; it changes as long as that does anything."""
    found = []
    for child in _below(guardian):
        try:
            with open(f"/proc/{child.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append((int(fields[11]) + int(fields[12]), _moved(child.pid)))
    return found


def _moved(pid: int) -> bytes:
    """What the kernel counts of a process's reads and writes; b"" where it does not: processor time tells alone."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""

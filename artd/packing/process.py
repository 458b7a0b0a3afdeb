"""Runs the packing child as a process: starts it under a guardian, watches it, and kills it when it stalls or takes too
long.

Owns the child's process. The child does not outlive the daemon. A child that is stopped, hangs in a read or loops for
ever is killed, and no group is blamed for that.
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
"""The longest time in which a child may use no processor time and read or write no byte."""
DEADLINE_S = 3600.0
CRASHES = tuple(128 + number for number in (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGILL))
"""Exit statuses of a guardian whose child was killed by a fault of its own code. SIGBUS may come from the disk, and
SIGKILL from a lack of memory."""


async def run_child(request: PackRequest, stall_s: float = STALL_S) -> PackResult | PackFailure:
    """Execute `python -m artd.packing.child` for one batch. A child that does nothing for `stall_s` seconds is killed."""
    try:
        with (
            death_pipe() as death,
            tempfile.TemporaryFile() as question,  # writing to a pipe would fail if the child dies early
            tempfile.TemporaryFile() as out,
            tempfile.TemporaryFile() as errors,
        ):
            question.write(msgspec.json.encode(request))
            question.seek(0)
            process = _start(death, question, out, errors)
            ended = await _watch(process, stall_s)
            return PackFailure(error=ended, kind="stalled") if ended else _answer(process.returncode, out, errors)
    except OSError as error:  # out of processes, memory or descriptors: try again later, as with a worker
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
    """Wait for the process's end. Returns why the daemon killed it, "" if it ended by itself."""
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
    """Yield an event that is set when the process has ended and can be waited for."""
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
    """Return the processor time and the bytes read and written of each process below the guardian. They change as long
    as one of them works."""
    found = []
    for child in _below(guardian):
        try:
            with open(f"/proc/{child.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        found.append((int(fields[11]) + int(fields[12]), _read_io(child.pid)))
    return found


def _read_io(pid: int) -> bytes:
    """Return the kernel's counts of a process's reads and writes, b"" if they cannot be read: then only processor time
    counts."""
    try:
        with open(f"/proc/{pid}/io", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""

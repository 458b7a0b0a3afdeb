"""The processes of a soak: finds them, hits them, and restarts clients.

Only a process whose command line or environment names the soak's folder is signalled. A stopped process is always continued.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.daemon.rig import ROOT, Rig


class Clients:
    """vocab: of the model; number: how many run at once."""

    def __init__(self, rig: Rig, number: int, vocab: int, gap_s: float, real: bool) -> None:
        self._rig = rig
        self._command = [
            sys.executable,
            "-m",
            "tests.soak.client",
            str(rig.root),
            "--vocab",
            str(vocab),
            "--gap",
            str(gap_s),
        ]
        if real:
            self._command.append("--real")
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._names = [f"client{n}" for n in range(number)]

    @property
    def journals(self) -> list[Path]:
        return [self._rig.root / f"{name}.journal" for name in self._names]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._running.values() if process.poll() is None]

    def tend(self) -> list[int]:
        """Start those that are not there. Returns exit statuses other than a kill's: a client that gave up."""
        odd = []
        for name in self._names:
            process = self._running.get(name)
            code = process.poll() if process else None
            if process is None or code is not None:
                if code == 0:
                    continue  # it came to its end
                if code not in (None, -signal.SIGKILL):
                    odd.append(code)
                self._start(name)
        return odd

    def _start(self, name: str) -> None:
        with (self._rig.root / "clients.log").open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "--name", name], cwd=ROOT, env=self._rig.environment(), stdout=log, stderr=log
            )
        self._running[name] = process
        self._rig.strangers = {client.pid for client in self._running.values()}

    @property
    def done(self) -> bool:
        """Whether every client has ended by itself."""
        return all(process.poll() == 0 for process in self._running.values())

    def end(self) -> None:
        for process in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait()


def children(pid: int) -> Iterator[int]:
    """Every living descendant."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
            yield child
            yield from children(child)


def victim(rig: Rig, clients: Clients, process: str, rng: random.Random) -> int:
    """Process id of somebody of this kind, 0 when there is nobody now."""
    if process == "daemon":
        return rig.pid
    if process == "client":
        return rng.choice(clients.pids or [0])
    rows = rig.rows("SELECT pid FROM process WHERE kind = ? AND pid IS NOT NULL", process)
    below = [pid for pid in (children(rng.choice(rows)[0]) if rows else ()) if ours(rig, pid)]
    return rng.choice(below) if below else 0


def ours(rig: Rig, pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
        folder = Path(f"/proc/{pid}")
        return os.fsencode(rig.root) in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes()
    return False


def send(rig: Rig, pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to be signalled."""
    if not pid or not ours(rig, pid):
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False

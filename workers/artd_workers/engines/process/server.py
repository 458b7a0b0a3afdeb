"""An engine's server as a child process: its start, death and end.

Each spawn has a fresh Unix socket in a 0700 folder; everything that it makes is there, or is found and removed at the end. This
owns the server's process group, `EngineConfig.dir`, the server's part of the log, and beside it the record of scratch files, by
which the next spawn removes what a spawn left in /dev/shm that was killed together with its harness. The server is spawned from
the harness's main thread, to which PR_SET_PDEATHSIG is tied. Once it serves, it ends when its engine does. Nothing of the group
lives after `stop`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

from artd_schema.run import scratch
from artd_schema.run.engines import engine_kind
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.gpus import refusal

from . import diagnose, health, process_group

TERM_S = 10.0
KILL_S = 5.0
_ABORT_S, _HEALTH_S = 2.0, 2.0
_SOCKET_BYTES = 107
_UUID_CHARS = 36
_SCAN_S = 1.0


class ServerProcess(ABC):
    """One spawn of a server. It cannot be restarted: a new spawn has a new harness. An engine says how it is started and asked.

    `lost`: why artd ended it although it was alive, "" when artd did not.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.folder = Path(config.dir)
        self.socket = self.folder / "s"
        self.scratch = self.folder / "t"
        self.log = Path(config.log)
        self.record = self.log.with_suffix(".scratch")
        self.ended = threading.Event()
        self.lost = ""
        self._over = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._files: set[Path] = set()
        self._scanning = threading.Lock()
        self._started = 0.0
        self._scanned = 0.0
        self._log_offset = 0
        self._ooms = 0

    @abstractmethod
    def command(self) -> list[str]:
        """Return the argument list of the server, which listens on `self.socket`. Raises EngineError."""

    @abstractmethod
    def environment(self) -> dict[str, str]:
        """Return the environment of the server. `self.scratch` is its TMPDIR."""

    @abstractmethod
    def check_health(self, deadline: Deadline) -> None:
        """Ask the server whether it can serve. Raises EngineError."""

    def files(self) -> dict[str, str]:
        """Return the texts that the server reads, by their names in `self.folder`."""
        return {}

    @abstractmethod
    def prove(self) -> None:
        """Try what the run needs of the server, once it serves. Raises EngineError."""

    @abstractmethod
    def end_requests(self, deadline: Deadline) -> None:
        """Ask the server to end all requests, before it is told to end. Raises EngineError."""

    def spawn(self) -> None:
        """Start the server and return at once. Raises EngineError when the folder or the interpreter cannot be used.

        It also raises when the GPU that the run wants is missing; the server itself would need a minute to say so, at every
        start.
        """
        if refused := refusal("engine.device", self.config.spec.engine.device):
            raise EngineError(refused)
        self._prepare()
        self._started = time.time() - 1.0
        self._ooms = diagnose.oom_kills()
        argv = [
            sys.executable,
            "-m",
            "artd_workers.engines.process.launch",
            str(os.getpid()),
            *self.command(),
        ]
        try:
            with open(self.log, "ab", opener=_private) as log:
                self._log_offset = log.tell()
                self._process = subprocess.Popen(
                    argv, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.scratch,
                    env=self.environment(), process_group=0,
                )  # fmt: skip
        except OSError as error:
            raise EngineError(
                f"the engine cannot be started with {self.config.python} (log {self.log}): {error}"
            ) from None
        threading.Thread(target=self._watch, args=(self._process,), name="artd-server", daemon=True).start()

    def serving(self) -> bool:
        """Return whether the server says that it can serve. Raises EngineError once it has ended.

        Call it until it returns True: only then its engine is watched.
        """
        self.scan()
        if self.ended.is_set():
            raise EngineError(self.death())
        if not self.socket.exists():
            return False
        try:
            self._ask()
        except EngineError:
            return False
        self.scan(now=True)
        self.prove()
        threading.Thread(target=self._watch_engine, name="artd-health", daemon=True).start()
        return True

    def scan(self, now: bool = False) -> None:
        """Remember which scratch files the group holds; after its death /proc no longer shows them. Any thread."""
        with self._scanning:
            if self._process is not None and (now or time.monotonic() - self._scanned >= _SCAN_S):
                self._scanned = time.monotonic()
                known = len(self._files)
                self._files |= process_group.scratch_files(process_group.members(self._process.pid), self._started)
                if len(self._files) > known:
                    scratch.record(self._files, self.record)

    def death(self) -> str:
        """Return why the server ended, in one sentence."""
        assert self._process is not None
        text = self.tail() + self.first_error()
        why = diagnose.cause(self._process.returncode, text, diagnose.oom_kills() > self._ooms, self.lost)
        title = engine_kind(self.config.spec.engine.kind).title
        return f"the {title} server of run {self.config.run} has ended: {why}{self.first_error()}"

    def first_error(self) -> str:
        """Return the first exception in this spawn's log as the end of a sentence, "" when there is none."""
        found = diagnose.first_error(self.log, self._log_offset) if self._process is not None else ""
        return f" (first error in its log: {found})" if found else ""

    def tail(self) -> str:
        """Return the last log lines of this spawn, "" when there was no process."""
        return diagnose.tail(self.log, self._log_offset) if self._process is not None else ""

    def kill(self) -> None:
        """End the group at once; its calls fail from now on. Any thread."""
        if self._process is not None:
            self.scan(now=True)
            process_group.kill(self._process.pid, KILL_S)

    def stop(self, grace_s: float) -> list[int]:
        """End the server within about `grace_s` seconds and remove its files. Returns processes that could not be ended.

        SIGTERM with requests in flight can hang a server for good, so they are ended first, and SIGKILL follows in any case.
        """
        left: list[int] = []
        self._over.set()
        if self._process is not None:
            deadline = Deadline(min(grace_s, TERM_S))
            self.scan(now=True)
            if grace_s > 0 and not self.ended.is_set():
                self._end_requests(Deadline(min(_ABORT_S, deadline.left)))
                process_group.signal_process(self._process.pid, signal.SIGTERM)
                process_group.wait_gone(self._process.pid, deadline.left)
            self.scan(now=True)
            left = process_group.kill(self._process.pid, KILL_S)
            self.ended.wait(KILL_S)
        scratch.remove(self._files)
        self.record.unlink(missing_ok=True)
        shutil.rmtree(self.scratch, ignore_errors=True)
        for name in self.files():
            (self.folder / name).unlink(missing_ok=True)
        self.socket.unlink(missing_ok=True)
        return left

    def _prepare(self) -> None:
        # A server may bind sockets named by a UUID in its TMPDIR.
        if (length := len(os.fsencode(self.scratch)) + 1 + _UUID_CHARS) > _SOCKET_BYTES:
            raise EngineError(
                f"sockets in {self.scratch} would have paths of {length} bytes, {_SOCKET_BYTES} are allowed: "
                "use a shorter runtime folder (XDG_RUNTIME_DIR)"
            )
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            info = self.folder.stat()
            if info.st_uid != os.getuid() or info.st_mode & 0o077:
                raise EngineError(
                    f"{self.folder} must be this user's own with mode 0700: its socket runs code for who reaches it"
                )
            self.scratch.mkdir(mode=0o700)
            for name, text in self.files().items():
                (self.folder / name).write_text(text)
            self.log.parent.mkdir(parents=True, exist_ok=True)
            scratch.sweep(self.record)  # left by a spawn that was killed together with its harness
        except OSError as error:
            raise EngineError(f"the engine's folder {self.folder} cannot be made: {error}") from None

    def _end_requests(self, deadline: Deadline) -> None:
        with contextlib.suppress(EngineError):  # SIGTERM and SIGKILL follow in any case
            self.end_requests(deadline)

    def _ask(self) -> None:
        self.check_health(Deadline(_HEALTH_S))

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self.ended.set()
        self._over.set()

    def _watch_engine(self) -> None:
        if why := health.await_loss(self._ask, self._over):
            self.lost = f"its engine has died ({why})"
            self.kill()


def _private(path: str, flags: int) -> int:
    """Open a file that only this user may read."""
    return os.open(path, flags, 0o600)

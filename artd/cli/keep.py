"""`artd start --restart`: a parent process (the keeper) that starts the daemon again when it dies.

It describes itself in DATA/logs/keeper.json. It does not start a daemon again that was told to stop or that never became ready.
It passes SIGTERM, SIGINT and SIGHUP on to the daemon, and ends with it. After too many deaths it gives up.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from artd import __version__
from artd.datadir.lock import describe
from artd.supervise.backoff import Backoff, Policy
from artd_schema.paths import LOGS, DaemonFile, read_daemon_file

from .outcome import INTERRUPTED, OK

FILE = "keeper.json"
POLICY = Policy(deaths=10)
"""The keeper gives up after ten deaths within ten minutes. It waits 0, 1, 2, 4 ... 60 s between them."""
LOOK_S = 0.1


def find_keeper(data: Path) -> DaemonFile | None:
    """Return the living keeper of this data folder, None when there is none."""
    found = read_daemon_file(data / LOGS, FILE)
    return found if found is not None and found.alive() else None


def keep(command: Sequence[str], data: Path) -> int:
    """Run the daemon that `command` starts, and start it again when it dies. Returns the exit status of the last one."""
    file = data / LOGS / FILE
    file.write_text(json.dumps(asdict(describe(__version__, 0.0))))
    try:
        return _Keeper(command, data).run()
    finally:
        with contextlib.suppress(OSError):
            if (found := find_keeper(data)) is not None and found.pid == os.getpid():
                file.unlink()


class _Keeper:
    def __init__(self, command: Sequence[str], data: Path) -> None:
        self._command = list(command)
        self._data = data
        self._child: subprocess.Popen[bytes] | None = None
        self._told = 0
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)

    def run(self) -> int:
        backoff = Backoff(POLICY, random.random)
        was_ready = False
        while True:
            began = time.monotonic()
            # A session of its own: Ctrl-C reaches the daemon once, through this process.
            self._child = subprocess.Popen(self._command, stdin=subprocess.DEVNULL, start_new_session=True, cwd="/")
            if self._told:
                self._child.send_signal(self._told)
            was_ready = self._await_ready(self._child) or was_ready
            code = self._child.wait()
            if self._told or code in (OK, INTERRUPTED) or not was_ready:
                return code if code >= 0 else 128 - code
            delay = backoff.record_death(began, time.monotonic())
            why = f"artd: the daemon (pid {self._child.pid}) ended with status {code}"
            if delay is None:
                print(f"{why}, as {POLICY.deaths} have within {POLICY.window_s:.0f} s: it stays down", file=sys.stderr)
                return code if code >= 0 else 128 - code
            print(f"{why}; starting it again in {delay:.0f} s", file=sys.stderr, flush=True)
            if self._rest(delay):
                return OK

    def _await_ready(self, child: subprocess.Popen[bytes]) -> bool:
        while child.poll() is None:
            told = read_daemon_file(self._data)
            if told is not None and told.pid == child.pid and told.state == "ready":
                return True
            time.sleep(LOOK_S)
        return False

    def _rest(self, seconds: float) -> bool:
        """Wait. Returns whether a signal ended the wait."""
        end = time.monotonic() + seconds
        while not self._told and (left := end - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left))
        return bool(self._told)

    def _pass_on(self, number: int, _frame: object) -> None:
        self._told = number
        if self._child is not None and self._child.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._child.pid, number)

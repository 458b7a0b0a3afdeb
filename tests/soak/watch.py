"""The waits of a soak, during each of which it also tends clients, collects manifests and acts as an operator would.

artd's tables tell only whom to help and when all is at rest.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable

from artd_schema.crashpoint import VARIABLE
from tests.daemon.rig import ROOT, Rig

from .evidence import Collector
from .journal import Acked, tail
from .processes import Clients

WORKERS = ("gateway", "trainer", "engine")
TICK_S = 0.02
LOOK_S = 0.1
BUSY = (
    "SELECT 1 FROM job WHERE state IN ('queued', 'running') UNION ALL"
    " SELECT 1 FROM push WHERE state IN ('prepared', 'sending') UNION ALL"
    " SELECT 1 FROM process WHERE state NOT IN ('ready', 'stopped') UNION ALL"
    " SELECT 1 FROM run WHERE flush = 1 OR state <> 'active'"
)


class Violated(Exception):
    """Something is so wrong that the soak cannot go on."""


class Watch:
    """helped: times that a run or a worker had to be told to go on. batch: groups of a step."""

    def __init__(self, rig: Rig, clients: Clients, collector: Collector, batch: int) -> None:
        self.helped = 0
        self._rig, self._clients, self._collector, self._batch = rig, clients, collector, batch
        self._looked = 0.0

    # ---- waiting ------------------------------------------------------------------------------------------------------

    def reaches(self, condition: Callable[[], bool], within_s: float, tend: bool = True) -> bool:
        """Whether the condition came true within so many seconds. tend: go on with everything else meanwhile."""
        end = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > end:
                return False
            if tend:
                self.tend()
            time.sleep(TICK_S)
        return True

    def wait(self, condition: Callable[[], bool], what: str, within_s: float) -> None:
        """The same, of what has to come true. Raises Violated."""
        if not self.reaches(condition, within_s):
            raise Violated(f"no sign of {what} within {within_s:.0f} s: {self._rig.log()}")

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.reaches(lambda: False, seconds)

    # ---- what is true now -----------------------------------------------------------------------------------------------

    def acks(self) -> list[Acked]:
        """The newest acknowledgements of all clients, oldest first."""
        found = [line for path in self._clients.journals for line in tail(path) if isinstance(line, Acked)]
        return sorted(found, key=lambda ack: ack.at)

    def all_ready(self) -> bool:
        """Whether daemon and workers can work."""
        rows = self._rig.rows("SELECT count(*), sum(state IN ('ready', 'busy')) FROM process")
        return self._rig.state() == "ready" and rows[0][0] == rows[0][1] >= len(WORKERS)

    def at_rest(self) -> bool:
        """Nothing is under way, and all that was trained is served."""
        if self._rig.state() != "ready" or self._rig.rows(BUSY):
            return False
        return bool(self._rig.one("SELECT count(*) FROM trajectory_group WHERE state = 'sealed'") < self._batch)

    def all_trained(self) -> bool:
        """At rest, and no trajectory waits."""
        left = "SELECT count(*) FROM trajectory WHERE state IN ('queued', 'packed')"
        return self.at_rest() and not self._rig.one(left)

    # ---- meanwhile ------------------------------------------------------------------------------------------------------

    def tend(self) -> None:
        """What has to go on all the time: look at manifests, keep clients alive, do what an operator would."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        if self._rig.process is not None and self._rig.process.poll() not in (None, -signal.SIGKILL):
            raise Violated(f"the daemon ended by itself with status {self._rig.process.poll()}: {self._rig.log()}")
        self._collector.look()
        for code in self._clients.tend():
            raise Violated(f"a client gave up with status {code}; see {self._rig.root / 'clients.log'}")
        if self._rig.state() == "ready":
            self._operate()

    def _operate(self) -> None:
        """A run that paused, or an engine that is tried later, because the hits looked like poison is told to go on."""
        paused = self._rig.rows("SELECT 1 FROM run WHERE state = 'paused'")
        broken = self._rig.rows("SELECT 1 FROM process WHERE state = 'broken'")
        delayed = self._rig.rows("SELECT 1 FROM push WHERE state = 'prepared' AND not_before > 0")
        if not paused and not broken and not delayed:
            return
        self.helped += 1
        for (job,) in self._rig.rows("SELECT id FROM job WHERE state = 'quarantined'"):
            self._artctl("retry", str(job))
        self._artctl("resume", "r")

    def _artctl(self, *words: str) -> None:
        command = [sys.executable, "-m", "artd.cli.ctl", *words, "--data-dir", str(self._rig.data)]
        env = {key: value for key, value in self._rig.environment().items() if key != VARIABLE}
        subprocess.run(command, cwd=ROOT, env=env, check=False, capture_output=True, timeout=60)

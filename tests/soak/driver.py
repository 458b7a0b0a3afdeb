"""Runs a soak: load, hits at random crash points, recoveries, and the verdict at the end.

It owns the daemon and the clients of one folder while it runs, and its lines in the file of hits. One hit happens at a time; a
hit during a recovery follows the kill that caused the recovery. A point that is armed and not reached is disarmed before the
next draw. The verdict uses nothing from artd's tables, which only tell whom to hit and when all is at rest.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from artd_client import ArtdError
from artd_client.sync import SyncClient
from artd_schema.crashpoint import POINTS
from tests.daemon.rig import Rig
from tests.fakes.script import Script

from . import history
from .cells import Action, Cell, Draw
from .evidence import Collector
from .journal import Acked, Line, Replied, read
from .processes import Clients, send, victim
from .table import Hit, Verdict
from .watch import Violated, Watch

SURVIVE_S = 2.0
RECOVERIES = 0.7  # of the daemon are hit themselves
Further = Callable[[Rig, Sequence[Replied]], list[history.Violation]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """seconds, kills: whichever is reached first (0: no such limit). take_s: how long a point may not be reached;
    ready_s: how long anything may take to be ready again; patient: hit only when every worker is ready, as one that is not
    takes so long to start that nothing else would be reached."""

    seed: int
    seconds: float
    kills: int
    lease_s: float
    workers: str = "fake"
    clients: int = 3
    vocab: int = 256
    gap_s: float = 0.2
    take_s: float = 6.0
    ready_s: float = 30.0
    patient: bool = False
    spec: dict[str, Any]


class Soak:
    """rig: whose daemon is not started yet; hits: open file of JSON lines; draw: of the cells."""

    def __init__(self, rig: Rig, plan: Plan, draw: Draw, hits: IO[str]) -> None:
        self._rig, self._plan, self._draw, self._hits = rig, plan, draw, hits
        self._rng = random.Random(plan.seed)
        self._clients = Clients(rig, plan.clients, plan.vocab, plan.gap_s, plan.workers == "real")
        self._collector = Collector(rig.data, "r")
        self._found: list[history.Violation] = []
        self._began = time.monotonic()
        self._kills = 0
        self._broken_off = False
        self._watch = Watch(rig, self._clients, self._collector, plan.spec["groups_per_step"])

    def run(self, further: Further = lambda rig, replies: []) -> Verdict:
        """further: violations that are found once all is at rest and the daemon has stopped."""
        rig = self._rig
        rig.points.mkdir()
        try:
            rig.start()
            self._create()
            self._clients.tend()
            self._watch.wait(lambda: bool(self._watch.acks()), "the first acknowledged submit", self._plan.ready_s)
            while not self._over:
                self._hit_once()
            self._come_to_rest()
            rig.stop()
            self._found += further(rig, [line for line in self._journal() if isinstance(line, Replied)])
        except (Violated, AssertionError, ArtdError, subprocess.TimeoutExpired) as error:
            self._found.append(history.Violation("stuck", str(error)))
            self._broken_off = True
        finally:
            self._clients.end()
        return self._judge()

    @property
    def _over(self) -> bool:
        plan = self._plan
        late = plan.seconds and time.monotonic() - self._began > plan.seconds
        return bool(late or (plan.kills and self._kills >= plan.kills))

    # ---- one hit ------------------------------------------------------------------------------------------------------

    def _hit_once(self) -> None:
        if self._plan.patient:
            self._watch.wait(self._watch.all_ready, "all workers", self._plan.ready_s)
        cell, action = self._draw.draw(recovering=False)
        if cell.phase == "idle":
            self._hit_idle(cell, action)
        else:
            self._hit_at(cell, action)

    def _hit_idle(self, cell: Cell, action: Action) -> None:
        rest = self._rig.root / "rest"
        rest.touch()
        try:
            if self._watch.reaches(self._watch.at_rest, self._plan.ready_s):
                self._strike(victim(self._rig, self._clients, cell.process, self._rng), cell, action, "")
            else:
                self._draw.missed[cell] += 1
                self._say("no rest")
        finally:
            rest.unlink()

    def _hit_at(self, cell: Cell, action: Action) -> None:
        """Arm a point of the phase. Who reaches it is the victim, or is held there while the victim is hit."""
        point, arrival = self._draw.point(cell)
        itself = POINTS[point] == cell.process
        kill = self._rng.choice(("kill", "late"))  # late: what was sent too early is heard
        self._rig.arm(point, action=f"{kill if itself and action == 'kill' else 'stop'} {arrival}")
        if not self._taken(point):
            self._draw.missed[cell] += 1
            self._say(f"nobody reached {point} ({arrival})")
            return
        reached = self._rig.taken(point)
        self._clear()
        if itself:
            self._strike(reached, cell, action, point, done=True)
            return
        try:
            struck = victim(self._rig, self._clients, cell.process, self._rng)
            hit = send(self._rig, struck, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        finally:
            send(self._rig, reached, signal.SIGCONT)
        if hit:
            self._strike(struck, cell, action, point, done=True)

    def _taken(self, point: str) -> bool:
        """Whether somebody took what is armed there; if not, nobody will any more."""
        if self._watch.reaches(lambda: bool(self._rig.taken(point)), self._plan.take_s):
            return True
        armed = self._rig.points / point
        try:
            armed.unlink()
        except FileNotFoundError:
            return bool(self._rig.taken(point))  # just now
        return False

    def _clear(self) -> None:
        for path in self._rig.points.glob("*.taken-*"):
            path.unlink()

    def _strike(self, pid: int, cell: Cell, action: Action, point: str, done: bool = False) -> None:
        """Kill or stop `pid` (done: it is already), see it through, write it down."""
        if not done and not send(self._rig, pid, signal.SIGKILL if action == "kill" else signal.SIGSTOP):
            return
        self._draw.done[cell, action] += 1
        if action == "pause":
            self._watch.sleep(self._draw.pause_s(self._plan.lease_s))
            send(self._rig, pid, signal.SIGCONT)
            self._write(cell, action, point)
            return
        self._kills += 1
        killed = time.monotonic()
        if cell.process == "daemon":
            self._write(cell, action, point, **self._raise_daemon(killed))
        elif cell.process in ("client", "packer"):
            self._write(cell, action, point)
        else:
            self._write(cell, action, point, ready_s=self._ready_again(cell.process, killed))

    def _write(self, cell: Cell, action: Action, point: str, **times: float | None) -> None:
        hit = Hit(
            process=cell.process, phase=cell.phase, action=action, point=point, workers=self._plan.workers, **times
        )
        self._hits.write(msgspec.json.encode(hit).decode() + "\n")
        self._hits.flush()
        self._say(f"{cell.process} {action} in {cell.phase} at {point or 'rest'}")

    def _say(self, what: str) -> None:
        print(f"{time.monotonic() - self._began:7.1f} s  {what}", file=sys.stderr, flush=True)

    # ---- recoveries ---------------------------------------------------------------------------------------------------

    def _raise_daemon(self, killed: float) -> dict[str, float | None]:
        """The daemon was killed: nothing may live on; then it starts again, perhaps to be hit while it recovers. How long that took."""
        self._bury()
        if self._rng.random() < RECOVERIES:
            self._hit_recovery()
            self._await_daemon()
            return {}  # hit again: no figure of one recovery
        self._rig.start(wait=False)
        self._await_daemon()
        ready, before = time.monotonic(), time.time()
        acked = self._watch.reaches(lambda: any(ack.at > before for ack in self._watch.acks()[-5:]), self._plan.take_s)
        return {"ready_s": ready - killed, "acked_s": time.monotonic() - killed if acked else None}

    def _bury(self) -> None:
        """The daemon was killed: two seconds later nothing of it lives."""
        self._rig.died()
        if not self._watch.reaches(lambda: not self._rig.living(), SURVIVE_S, tend=False):
            self._found.append(history.Violation("survivor", f"{SURVIVE_S} s after kill -9: {self._rig.living()}"))
            raise Violated("processes outlived the daemon")

    def _hit_recovery(self) -> None:
        cell, action = self._draw.draw(recovering=True)
        point, _ = self._draw.point(cell)
        itself = POINTS[point] == cell.process
        self._rig.arm(point, action="kill" if itself and action == "kill" else "stop")
        self._rig.start(wait=False)
        wait = self._plan.ready_s if point == "engine.started" else self._plan.take_s
        if not self._watch.reaches(lambda: bool(self._rig.taken(point)) or self._died(), wait):
            (self._rig.points / point).unlink(missing_ok=True)
        if not (reached := self._rig.taken(point)):
            self._draw.missed[cell] += 1
            return
        self._clear()
        if itself and action == "kill" and cell.process == "daemon":
            self._kills += 1
            self._draw.done[cell, action] += 1
            self._write(cell, action, point)
            self._bury()
            self._rig.start(wait=False)
            return
        struck, hit = reached, itself
        if not itself:
            struck = victim(self._rig, self._clients, cell.process, self._rng)
            hit = send(self._rig, struck, signal.SIGKILL if action == "kill" else signal.SIGSTOP)
            send(self._rig, reached, signal.SIGCONT)
        if hit:
            self._strike(struck, cell, action, point, done=True)

    def _died(self) -> bool:
        return self._rig.process is not None and self._rig.process.poll() is not None

    def _await_daemon(self) -> None:
        self._watch.wait(
            lambda: self._died() or self._rig.state() == "ready", "the daemon to be ready", self._plan.ready_s
        )
        if self._died():
            raise Violated(f"the daemon does not start: {self._rig.log()}")

    def _ready_again(self, name: str, killed: float) -> float | None:
        """Seconds until another process of this worker can take work; None when it takes longer than a hit may wait."""
        before = self._rig.one("SELECT sum(spawn) FROM process WHERE kind = ?", name)
        sql = "SELECT 1 FROM process WHERE kind = ? GROUP BY kind HAVING sum(spawn) > ? AND min(state IN ('ready', 'busy'))"
        within_s = self._plan.ready_s if self._plan.patient else self._plan.take_s
        if before and self._watch.reaches(lambda: bool(self._rig.rows(sql, name, before)), within_s):
            return time.monotonic() - killed
        return None

    # ---- start and end ------------------------------------------------------------------------------------------------

    def _create(self) -> None:
        with SyncClient(self._rig.data, timeout=self._plan.ready_s) as client:
            client.run("r", model=self._rig.model, **self._plan.spec).wait(0, timeout=self._plan.ready_s)

    def _come_to_rest(self) -> None:
        """No more hits: clients finish what they began, and everything that was acknowledged is trained."""
        (self._rig.root / "end").touch()
        self._watch.wait(lambda: self._clients.done, "the clients' end", 4 * self._plan.ready_s)
        self._watch.wait(self._watch.at_rest, "rest", 4 * self._plan.ready_s)
        with SyncClient(self._rig.data, timeout=self._plan.ready_s) as client:
            client.run("r").flush()
        self._watch.wait(self._watch.all_trained, "the last step", 4 * self._plan.ready_s)
        self._collector.look()

    def _journal(self) -> list[Line]:
        return [line for path in self._clients.journals for line in read(path)]

    def _judge(self) -> Verdict:
        script = self._rig.script if self._plan.workers == "fake" else None
        waiting: set[int] = set()
        if self._broken_off:  # nobody waited until all of them were trained
            waiting = {line.trajectory for line in self._journal() if isinstance(line, Acked)}
        evidence = self._collector.evidence(self._clients.journals, script, frozenset(waiting))
        self._found += history.judge(evidence)
        kinds = {kind: sum(violation.kind == kind for violation in self._found) for kind in history.KINDS}
        verdict = Verdict(
            seed=self._plan.seed, workers=self._plan.workers, seconds=time.monotonic() - self._began, helped=self._watch.helped,
            steps=max((manifest.step for manifest in evidence.manifests.values()), default=0),
            acked=sum(isinstance(line, Acked) for line in evidence.journal),
            replies=sum(isinstance(line, Replied) for line in evidence.journal),
            found={kind: number for kind, number in kinds.items() if number},
            what=tuple(f"{violation.kind}: {violation.what}" for violation in self._found[:20]),
        )  # fmt: skip
        self._hits.write(msgspec.json.encode(verdict).decode() + "\n")
        self._hits.flush()
        return verdict


def fresh(rig: Rig, lease_s: float) -> None:
    """The settings of a soak: a short lease, fakes that serve and sign."""
    text = rig.config.read_text()
    rig.config.write_text(text.replace("[limits]\n", f"[limits]\nlease_s = {lease_s}\n"))
    Script(Path(rig.script.path)).write(http=1, sign=1)

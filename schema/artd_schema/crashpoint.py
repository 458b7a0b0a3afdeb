"""Crash points: named moments of production code at which a test may end or stop the process that reaches them.

So tests kill at *moments*, not at times. A test arms points in the folder `$ARTD_CRASH_DIR`, which every process of a daemon
inherits. Without that variable `reach` is an empty function.

A file named as the point arms it. It holds an action and optionally the number of the arrival (`kill`, `stop`, `kill 3`). The
process that takes the action first renames the file to `NAME.taken-PID`, so an action happens once. `kill` is SIGKILL. `late`
is SIGKILL after 0.1 s in which other threads go on, so that anything sent too early gets out. `stop` is SIGSTOP; somebody else
continues the process. Every arrival is a line `NAME PID` in the file `reached`. `POINTS` names every point with the process
that reaches it; a test checks that none is missing.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

VARIABLE = "ARTD_CRASH_DIR"
REACHED = "reached"
ACTIONS = {"kill": signal.SIGKILL, "late": signal.SIGKILL, "stop": signal.SIGSTOP}
LATE_S = 0.1

POINTS: dict[str, str] = {
    # the daemon: what comes in
    "submit.inserted": "daemon",  # rows of trajectories written, not committed
    "submit.committed": "daemon",  # committed, nobody has been answered
    "exchange.committed": "daemon",  # the ledger has the turn, the gateway has not been told
    "delivery.committed": "daemon",  # the ledger says how a reply of a rollout ended
    "refer.committed": "daemon",  # a trajectory by reference is committed, nobody has been answered
    "run.created": "daemon",  # committed, the client has not been told
    # the daemon: database and files
    "writer.commit": "daemon",  # before COMMIT of any group of writes
    "writer.committed": "daemon",  # after it, before anybody hears of it
    "wal.checkpoint": "daemon",  # before the WAL is folded into the database
    "file.written": "daemon",  # a file is durable under its temporary name
    "file.renamed": "daemon",  # it has its name, its folder is not fsynced
    "publish.renamed": "daemon",  # the same for what somebody else wrote
    "schema.created": "daemon",  # a new database has its schema, and nothing else
    "migrate.backed_up": "daemon",  # the copy is durable, nothing is migrated
    "migrate.done": "daemon",  # migrated and committed
    # the daemon: a step
    "pack.requested": "daemon",
    "pack.written": "packer",  # the batch's files are written, the daemon does not know
    "pack.adopted": "daemon",  # blobs in place, rows not
    "pack.committed": "daemon",
    "job.claimed": "daemon",  # committed, the trainer has not been told
    "job.failed": "daemon",  # a failure is committed, the trainer has not been told
    "result.verified": "daemon",
    "result.published": "daemon",  # the checkpoint's folder has its name, its row is not there
    "result.committed": "daemon",  # the step exists, the trainer has not been told
    "push.claimed": "daemon",
    "push.held": "daemon",  # the gateway holds, the engine has not been told to go on
    "push.live": "daemon",  # the engine said Live, no row says so
    "push.served": "daemon",  # committed, the gateway still holds
    "retain.retired": "daemon",  # rows retired, files there
    "gc.trashed": "daemon",  # rows gone, files in the trash
    "gc.unlinked": "daemon",  # some files of the trash are gone
    # the daemon: start and stop
    "reap.done": "daemon",
    "recover.adopted": "daemon",  # finished results are committed, the rest is not yet taken back
    "recover.interrupted": "daemon",  # rows taken back, files not yet removed
    "recover.removed": "daemon",  # one folder of the leftovers is gone
    "spawn.started": "daemon",  # a worker's guardian runs, and no row says so
    "stop.drained": "daemon",  # workers have ended, the database is open
    # the workers
    "train.accepted": "trainer",
    "train.stepped": "trainer",  # weights in memory are new, nothing is written
    "stage.files": "trainer",  # every file but the manifest is durable
    "stage.manifest": "trainer",  # the result is complete, nobody knows
    "train.committed": "trainer",  # Committed arrived, memory is not yet tagged
    "engine.started": "engine",  # the server answers, the daemon does not know
    "engine.fenced": "engine",  # a push was taken, the engine is untouched
    "engine.pausing": "engine",  # the daemon was asked for the hold, the engine goes on generating
    "engine.paused": "engine",
    "engine.updated": "engine",  # new weights are in, not published
    "engine.resumed": "engine",  # serving, the gateway holds
    "engine.verified": "engine",  # the daemon does not know
    "gateway.held": "gateway",  # admits nothing, the daemon does not know
    "gateway.generated": "gateway",  # a response is complete, the ledger does not have it
    "gateway.recorded": "gateway",  # the ledger has it, its end has not been sent
    "gateway.ended": "gateway",  # a reply of a rollout was sent or lost, the daemon does not know
    # the client
    "client.sent": "client",  # a request is on its way
}
"""Point: the process that reaches it."""

RECOVERY = ("reap.done", "recover.adopted", "recover.interrupted", "recover.removed")
"""Points of a boot that repairs."""


def _off(name: str) -> None:
    """Do nothing, because nothing is armed in this process."""


def _on(name: str) -> None:
    """Record the arrival, and take the action that is armed for this point."""
    folder = Path(os.environ[VARIABLE])
    with (folder / REACHED).open("a") as file:
        file.write(f"{name} {os.getpid()}\n")
    if (action := _take(folder / name)) is not None:
        if action == "late":
            time.sleep(LATE_S)
        os.kill(os.getpid(), ACTIONS[action])


def list_reached(folder: Path) -> list[str]:
    """Return the points of every arrival so far, oldest first. `folder`: the folder of $ARTD_CRASH_DIR."""
    path = folder / REACHED
    return [line.partition(" ")[0] for line in path.read_text().splitlines()] if path.exists() else []


def _take(armed: Path) -> str | None:
    """Return the action for this arrival, None when there is none; an arrival before the armed one counts down."""
    try:
        action, _, left = armed.read_text().strip().partition(" ")
        if action not in ACTIONS:
            return None  # another process counts down at this moment
        if int(left or 1) > 1:
            armed.write_text(f"{action} {int(left) - 1}")
            return None
        armed.rename(armed.with_name(f"{armed.name}.taken-{os.getpid()}"))
    except FileNotFoundError:
        return None
    return action


reach: Callable[[str], None] = _on if VARIABLE in os.environ else _off

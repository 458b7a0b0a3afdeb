"""Live pushes: send the tensors of a committed checkpoint to the engine, by the way that the daemon names.

`Pusher` runs each push in a thread of its own, so that the worker can go on receiving from the daemon. The daemon may
order the next job as soon as the engine is live, before this side has ended. For each engine, a pusher owns the newest (trainer
spawn, engine spawn) pair, which its rendezvous names, and the highest fence.

Only a resident, committed checkpoint is sent; for anything else the answer is `Refused`. A push with a lower fence
than an earlier one to its engine is refused. A pair whose push failed is not used again, and a new rendezvous closes the pair
before it. A push that the engine has taken leaves its pair alive, even when the daemon learns of the success before
this process does. The trainer never reports success: only the harness says `Live`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from artd_schema.wire.worker import Push, Refused, Transfer
from artd_workers.deadline import Deadline
from artd_workers.trainer.push.direct.weight_lock import Stale

from .snapshot import Snapshot
from .ways import Broken, Unable, Way, open_way

log = logging.getLogger(__name__)
_LOOK_S = 0.1
END_S = 0.5
"""Grace period after the daemon ends a push. The engine reports `Live` as soon as it has the last tensor, a moment
before our sending thread notices.
"""


@dataclass
class Pair:
    """The connection between one process (spawn) of the trainer and one of an engine. The push that uses `way` holds
    the lock `in_use`."""

    rendezvous: str
    way: Way
    in_use: threading.Lock = field(default_factory=threading.Lock)
    dead: bool = False

    @property
    def afresh(self) -> str:
        """Why a dead pair is not used."""
        return f"a push over {self.rendezvous} failed before; the engine must start afresh"

    @contextmanager
    def use(self) -> Iterator[None]:
        """Reserve the way for one push. Raises Broken when the pair is dead, or dies while this push waits."""
        while not self.in_use.acquire(timeout=_LOOK_S):
            if self.dead:
                raise Broken(self.afresh)
        try:
            if self.dead:
                raise Broken(self.afresh)
            yield
        finally:
            self.in_use.release()

    def abort(self) -> None:
        """End whatever waits, and never use the pair again. Harmless when nothing waits."""
        self.dead = True
        self.way.abort()

    def retire(self) -> None:
        """End whatever waits, and give back what the pair holds as soon as it is free."""
        self.abort()
        threading.Thread(target=self._close, name="push-close", daemon=True).start()

    def _close(self) -> None:
        with self.in_use:
            self.way.close()


@dataclass
class Running:
    """A push under way. `over` is set when it has ended, well or not."""

    pair: Pair
    over: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Give the push `END_S` to end by itself, then abort its pair."""
        if not self.over.wait(END_S):
            self.pair.abort()


class Pusher:
    """Runs pushes. `send` sends a message to the daemon. Only the link's thread calls `push` and `end`."""

    def __init__(self, send: Callable[[Refused], None]) -> None:
        self._send = send
        self._fences: dict[str, int] = {}
        self._pairs: dict[str, Pair] = {}
        self._running: dict[tuple[int, int], Running] = {}

    def push(self, message: Push, snapshot: Snapshot | None) -> None:
        """Send `snapshot` for a push, or answer Refused when there is none. Returns at once."""
        if message.fence < (seen := self._fences.get(message.engine, 0)):
            return self._refuse(message, f"fence {message.fence} is older than {seen}")
        self._fences[message.engine] = message.fence
        if snapshot is None:
            ref = message.checkpoint
            return self._refuse(message, f"the trainer's memory does not hold {ref.run}@{ref.step} ({ref.sha[:16]})")
        pair = self._pairs.get(message.engine)
        if pair is None or pair.rendezvous != message.rendezvous:
            if pair is not None:
                pair.retire()  # a pair of spawns has one rendezvous, so its engine is gone
            pair = self._pairs[message.engine] = Pair(
                message.rendezvous, open_way(message.transfer, message.rendezvous)
            )
        elif pair.dead:
            return self._refuse(message, pair.afresh)
        self._running[message.push, message.fence] = Running(pair)
        thread = threading.Thread(
            target=self._run, args=(message, snapshot, pair), name=f"push-{message.push}", daemon=True
        )
        thread.start()
        return None

    def end(self, push: int, fence: int) -> None:
        """Handle the daemon's word that a push is over: abort the push if it does not end by itself. Returns at once."""
        running = self._running.get((push, fence))
        if running is not None:
            threading.Thread(target=running.end, name=f"push-end-{push}", daemon=True).start()

    def _refuse(self, message: Push, reason: str, transfer: Transfer | None = None) -> None:
        """Refuse a push. `transfer` is the way that cannot be used, None when the way is not the reason."""
        log.info("push %d refused: %s", message.push, reason)
        self._send(Refused(push=message.push, fence=message.fence, reason=reason, transfer=transfer))

    def _run(self, message: Push, snapshot: Snapshot, pair: Pair) -> None:
        deadline = Deadline(message.deadline_s + message.drain_s)
        try:
            with pair.use():
                _transfer(message, snapshot, pair, deadline)
        except Unable as error:
            pair.dead = True
            self._refuse(message, str(error), message.transfer)
        except Stale as error:
            self._refuse(message, str(error))
        except Broken as error:
            pair.dead = True
            self._refuse(message, str(error))
        except Exception as error:
            # The engine's end fails too, and the harness reports that.
            pair.dead = True
            log.warning("push %d to %s ended: %s: %s", message.push, message.name, type(error).__name__, error)
        finally:
            self._running.pop((message.push, message.fence)).over.set()


def _transfer(message: Push, snapshot: Snapshot, pair: Pair, deadline: Deadline) -> None:
    """Prepare the pair's way and send the snapshot. Raises what `Way` raises, and Stale."""
    started = time.monotonic()
    if snapshot.team is not None and message.transfer != "direct":
        raise Unable(
            f"the trainer's weights lie in several processes, which only a direct push can serve, not {message.transfer}"
        )
    try:
        pair.way.prepare(snapshot)
    except Unable:
        raise
    except Exception as error:
        raise Broken(f"{type(error).__name__}: {error}") from error
    with snapshot.hold(deadline, pair.abort):
        pair.way.send(message, snapshot, deadline)
    log.info("push %d: %d tensors sent in %.2f s", message.push, len(snapshot.entries), time.monotonic() - started)

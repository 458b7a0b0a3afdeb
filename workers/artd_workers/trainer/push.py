"""Live pushes: the tensors of a committed checkpoint go to the engine over a gloo group of two.

Purpose: `Pusher` sends a snapshot in a thread of its own, so that the next job can start meanwhile. Owner of: the process
group of the newest (trainer spawn, engine spawn) pair, named by its rendezvous file.
Invariants: only a resident, committed checkpoint is sent, anything else is `Refused`; a push with a lower fence than one
seen is refused; a pair whose push failed is not used again; the trainer never reports success: only the harness says `Live`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch.distributed as dist

from artd_schema.worker import Push, Refused

from ..engines import gloo
from .trainer import Snapshot

log = logging.getLogger(__name__)


@dataclass
class Pair:
    """One (trainer spawn, engine spawn). turn: held by the push that uses the group."""

    rendezvous: str
    turn: threading.Lock = field(default_factory=threading.Lock)
    group: dist.ProcessGroupGloo | None = None
    dead: bool = False

    def abort(self) -> None:
        """End what waits on the group; harmless when there is none yet."""
        self.dead = True
        if self.group is not None:
            self.group.abort()


class Pusher:
    """send: sends a message to the daemon. `push` and `end` are called from the link's thread alone."""

    def __init__(self, send: Callable[[Refused], None]) -> None:
        self._send = send
        self._fence = 0
        self._pair: Pair | None = None
        self._running: dict[tuple[int, int], Pair] = {}

    def push(self, message: Push, snapshot: Snapshot | None) -> None:
        """Send `snapshot` for a push, or answer Refused when there is none. Returns at once."""
        if message.fence < self._fence:
            return self._refuse(message, f"fence {message.fence} is older than {self._fence}")
        self._fence = message.fence
        if snapshot is None:
            ref = message.checkpoint
            return self._refuse(message, f"the trainer's memory does not hold {ref.run}@{ref.step} ({ref.sha[:16]})")
        pair = self._pair
        if pair is None or pair.rendezvous != message.rendezvous:
            if pair is not None:
                pair.abort()  # its engine is gone: a pair of spawns has one file
            pair = self._pair = Pair(message.rendezvous)
        elif pair.dead:
            return self._refuse(
                message, f"a push over {message.rendezvous} failed before; the engine must start afresh"
            )
        self._running[message.push, message.fence] = pair
        thread = threading.Thread(
            target=self._run, args=(message, snapshot, pair), name=f"push-{message.push}", daemon=True
        )
        thread.start()
        return None

    def end(self, push: int, fence: int) -> None:
        """The daemon says that a push is over: abort it if it still runs."""
        pair = self._running.get((push, fence))
        if pair is not None:
            pair.abort()

    def _refuse(self, message: Push, reason: str) -> None:
        log.info("push %d refused: %s", message.push, reason)
        self._send(Refused(push=message.push, fence=message.fence, reason=reason))

    def _run(self, message: Push, snapshot: Snapshot, pair: Pair) -> None:
        try:
            with pair.turn:
                transfer(message, snapshot, pair)
        except Exception as error:
            # The engine sees its own end of this fail, and the harness reports it.
            pair.dead = True
            log.warning("push %d to %s ended: %s: %s", message.push, message.name, type(error).__name__, error)
        finally:
            self._running.pop((message.push, message.fence), None)


def transfer(message: Push, snapshot: Snapshot, pair: Pair) -> None:
    """Meet the engine (once per pair) and broadcast the tensors in order. Raises at the deadline or when the pair dies."""
    started = time.monotonic()
    end = started + message.deadline_s + message.drain_s
    if pair.group is None:
        pair.group = gloo.join(message.rendezvous, gloo.TRAINER, end - started)
    for entry, tensor in snapshot.tensors:
        left = end - time.monotonic()
        if pair.dead or left <= 0:
            raise TimeoutError(f"aborted or past its deadline before {entry.name}")
        gloo.broadcast(pair.group, tensor, left)
    log.info("push %d: %d tensors sent in %.2f s", message.push, len(snapshot.tensors), time.monotonic() - started)

"""Live pushes: the tensors of a committed checkpoint go to the engine over a gloo group of two.

Purpose: `Pusher` sends a snapshot in a thread of its own, so that the next job can start meanwhile. Owner of: the process
group of the newest (trainer spawn, engine spawn) pair, named by its rendezvous file.
Invariants: only a resident, committed checkpoint is sent, anything else is `Refused`; a push with a lower fence than one
seen is refused; the trainer never reports success: only the harness says `Live`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from artd_schema.worker import Push, Refused

from ..engines import gloo
from .trainer import Snapshot

log = logging.getLogger(__name__)


class Pusher:
    """send: sends a message to the daemon. Called from the link's thread; sends from its own."""

    def __init__(self, send: Callable[[Refused], None]) -> None:
        self._send = send
        self._fence = 0
        self._lock = threading.Lock()
        self._rendezvous = ""
        self._group: dist.ProcessGroupGloo | None = None
        self._current: tuple[int, int] | None = None
        self._turn = threading.Lock()

    def push(self, message: Push, snapshot: Snapshot | None) -> None:
        """Send `snapshot` for a push, or answer Refused when there is none. Returns at once."""
        if message.fence < self._fence:
            return self._refuse(message, f"fence {message.fence} is older than {self._fence}")
        self._fence = message.fence
        if snapshot is None:
            ref = message.checkpoint
            return self._refuse(message, f"the trainer's memory does not hold {ref.run}@{ref.step} ({ref.sha[:16]})")
        thread = threading.Thread(target=self._run, args=(message, snapshot), name=f"push-{message.push}", daemon=True)
        thread.start()
        return None

    def end(self, push: int, fence: int) -> None:
        """The daemon says that a push is over: abort it if it still runs."""
        with self._lock:
            if self._current == (push, fence) and self._group is not None:
                self._group.abort()

    def _refuse(self, message: Push, reason: str) -> None:
        log.info("push %d refused: %s", message.push, reason)
        self._send(Refused(push=message.push, fence=message.fence, reason=reason))

    def _run(self, message: Push, snapshot: Snapshot) -> None:
        with self._turn:
            try:
                self._transfer(message, snapshot)
            except Exception as error:
                # The engine sees its own end of this fail and the harness reports it; the pair is not used again.
                log.warning("push %d to %s ended: %s: %s", message.push, message.name, type(error).__name__, error)
                with self._lock:
                    self._group, self._rendezvous = None, ""
            finally:
                with self._lock:
                    self._current = None

    def _transfer(self, message: Push, snapshot: Snapshot) -> None:
        end = time.monotonic() + message.deadline_s + message.drain_s
        if self._rendezvous != message.rendezvous or self._group is None:
            group = gloo.join(message.rendezvous, gloo.TRAINER, end - time.monotonic())
            with self._lock:
                self._group, self._rendezvous = group, message.rendezvous
        with self._lock:
            group, self._current = self._group, (message.push, message.fence)
        started = time.monotonic()
        for entry, tensor in snapshot.tensors:
            if (left := end - time.monotonic()) <= 0:
                raise TimeoutError(f"deadline passed before {entry.name}")
            gloo.broadcast(group, tensor, left)
        log.info("push %d: %d tensors sent in %.2f s", message.push, len(snapshot.tensors), time.monotonic() - started)

"""The trainer as a worker of the daemon: messages in, reports out.

`TrainerWorker` turns the daemon's messages into calls of `Trainer` and `Pusher`. It owns the queue of jobs and the
set of cancelled jobs. Jobs run one after the other in the main thread. Every other message takes effect at once, in
the order of arrival, in the link's thread; a Push may directly follow its Committed. After any answer but Committed,
the next job starts from disk.
"""

from __future__ import annotations

import errno
import logging
import queue
import shutil
import sys
import time
import traceback
from pathlib import Path

from artd_schema.crashpoint import reach
from artd_schema.wire import worker as w
from artd_workers.base_files import BaseChanged
from artd_workers.daemon_link import Link
from artd_workers.models.base import UnsupportedModel
from artd_workers.trainer.batch.rows import BatchError
from artd_workers.trainer.checkpoint.folder import CheckpointError
from artd_workers.trainer.push.pusher import Pusher
from artd_workers.trainer.step.step import Cancelled, NonFinite

from .trainer import Trainer

log = logging.getLogger(__name__)
_TRACE = 4000
_POLL_S = 0.5
SWITCH_S = 0.0005
"""Seconds between switches of Python threads. A push beside a train step needs many short time slices."""
_BROKEN_S = 5.0
"""How long the daemon gets to answer the report of a job that left the ranks out of step, before all ranks restart."""


class TrainerWorker:
    """Runs until the daemon says Exit or is gone."""

    def __init__(self, link: Link, trainer: Trainer) -> None:
        self._link, self._trainer = link, trainer
        self._pusher = Pusher(link.send)
        self._todo: queue.SimpleQueue[w.Run | Path] = queue.SimpleQueue()
        self._cancelled: set[tuple[int, int]] = set()
        self._seen: set[tuple[int, int]] = set()
        self._waiting: tuple[int, int] | None = None
        self._staged: Path | None = None
        self._exit_at: float | None = None
        self._status = 0

    def run(self) -> int:
        """Serve the daemon. Returns the exit status."""
        sys.setswitchinterval(SWITCH_S)
        self._link.on_message = self._take
        self._link.send(w.Ready(transfers=self._trainer.transfers()))
        while not self._link.closed.is_set() and not self._may_go():
            try:
                task = self._todo.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(task, w.Run):
                if not self._trainer.ranks.broken:
                    self._job(task)
            else:
                shutil.rmtree(task, ignore_errors=True)
        return self._status

    def _may_go(self) -> bool:
        """Return whether the daemon has sent Exit, and either every report is answered or the grace period is over."""
        return self._exit_at is not None and (self._waiting is None or time.monotonic() >= self._exit_at)

    # ---- the link's thread --------------------------------------------------------------------------------------------

    def _take(self, message: w.ToWorker, _bulk: list[bytes]) -> None:
        if isinstance(message, w.Run):
            self._todo.put(message)
        elif isinstance(message, w.Committed | w.Fenced | w.Ack):
            self._verdict(message)
        elif isinstance(message, w.Cancel):
            self._cancelled.add((message.job, message.fence))
        elif isinstance(message, w.Push):
            self._pusher.push(message, self._trainer.snapshot_of(message.checkpoint))
        elif isinstance(message, w.PushEnd):
            self._pusher.end(message.push, message.fence)
        elif isinstance(message, w.Exit):
            self._exit_at = time.monotonic() + message.grace_s
        else:
            log.warning("a trainer got a message that it does not handle: %s", type(message).__name__)

    def _verdict(self, message: w.Committed | w.Fenced | w.Ack) -> None:
        identity = (message.job, message.fence)
        if identity != self._waiting:
            if isinstance(message, w.Fenced):
                self._cancelled.add(identity)  # another attempt claimed this running job
            return
        if isinstance(message, w.Committed):
            reach("train.committed")
            self._trainer.mark_committed(message.checkpoint, message.fence)
        else:
            self._trainer.discard()
            if isinstance(message, w.Fenced) and self._staged is not None:
                self._todo.put(self._staged)
        self._waiting, self._staged = None, None
        self._link.idle()

    # ---- the main thread ----------------------------------------------------------------------------------------------

    def _job(self, run: w.Run) -> None:
        identity = (run.job, run.fence)
        if identity in self._seen:
            return  # the daemon sent it again; the link resends the first report until it is answered
        self._seen.add(identity)
        self._link.busy(*identity)
        self._link.send(w.Accepted(job=run.job, fence=run.fence))
        reach("train.accepted")
        report: w.Staged | w.Failed
        failed: Exception | None = None
        try:
            staged = self._trainer.run(run, self._link.progress, lambda: self._stopped(identity))
            report = w.Staged(job=run.job, fence=run.fence, dir=run.dir, manifest_sha=staged.sha, metrics=staged.metrics,
                              seconds=staged.seconds)  # fmt: skip
            self._staged = Path(run.dir)
        except Exception as error:
            failed = error
            self._trainer.discard()
            failure, text = classify(error)
            log.warning("job %d fence %d failed (%s): %s", run.job, run.fence, failure, text)
            report = w.Failed(
                job=run.job, fence=run.fence, failure=failure, error=text, trace=traceback.format_exc()[-_TRACE:]
            )
            shutil.rmtree(run.dir, ignore_errors=True)
        self._waiting = identity
        self._link.report(report)
        if self._trainer.ranks.broken or isinstance(failed, BaseChanged):  # the next process reads the files again
            self._status, self._exit_at = 1, time.monotonic() + _BROKEN_S

    def _stopped(self, identity: tuple[int, int]) -> bool:
        return identity in self._cancelled or self._exit_at is not None


def classify(error: Exception) -> tuple[w.FailureClass, str]:
    """Return what a job's exception means to the daemon, and its text: what, where, what next."""
    text = str(error) or type(error).__name__
    if isinstance(error, Cancelled):
        return "interrupted", text
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            "full",
            f"disk full while writing {error.filename or 'the checkpoint'}: free space; the job continues by itself",
        )
    if isinstance(error, MemoryError) or is_out_of_memory(error):
        return "transient", f"out of memory in the trainer ({text}): lower row_length or close other programs"
    if isinstance(error, NonFinite | BatchError | CheckpointError | UnsupportedModel | ValueError | ArithmeticError):
        return "permanent", text
    return "transient", f"{type(error).__name__}: {text}"


def is_out_of_memory(error: Exception) -> bool:
    """Return whether torch ran out of memory. Its CPU allocator raises a RuntimeError that says so only in its text."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)

"""The engine worker's main loop, between the link to the daemon and the server.

It starts the server, says Ready, serves Push, Proceed, Unload and Exit, and tells the daemon when the server is gone. The main
thread starts, watches and ends the server. Pushes run in a thread of their own, one at a time. A failed push ends the engine,
and a dead server ends the harness (`Down`). The daemon then starts a new spawn, which gets the newest committed checkpoint
before it serves. An engine with unknown weights is never verified again.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

from artd_schema.crashpoint import reach
from artd_schema.run.engines import engine_kind
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.base_files import BaseChanged, BaseFiles
from artd_workers.daemon_link import Link, LinkClosed
from artd_workers.deadline import Deadline
from artd_workers.engines.process import marks, progress

from .adapter import Adapter, EngineError, model_name
from .hold import Hold
from .push import Pusher, PushError, Stale
from .registry import engine_of
from .transfers import table_of, transfers_of
from .warm import WARM_S, pays, warm

START_S = 600.0
_TICK_S = 0.2
_TIDY_S = 0.5
_CALL_S = 5.0
_DEFAULT_GRACE_S = 10.0
_TOLD_S = 2.0


class EngineWorker:
    """One spawn. `run` returns the exit code: 0 after Exit, 1 when the server could not start, died, or was ended."""

    def __init__(self, link: Link, config: EngineConfig) -> None:
        self._link = link
        self._config = config
        self._kind = engine_kind(config.spec.engine.kind)
        self._engine = engine_of(config.spec.engine.kind)
        self._server = self._engine.server(config)
        self._base: BaseFiles | None = None
        self._hold = Hold(link.send)
        self._pusher: Pusher | None = None
        self._pushes: queue.SimpleQueue[w.Push] = queue.SimpleQueue()
        self._current: w.Push | None = None
        self._broken = ""
        self._told: tuple[int, int, object] | None = None
        self._grace_s: float | None = None

    def run(self) -> int:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        error = ""
        try:
            self._base = BaseFiles(self._config.spec.model, self._config.base)
            self._server.spawn()
            if self._start():
                error = self._serve()
        except (EngineError, BaseChanged) as failure:
            error = str(failure)
        except LinkClosed:
            self._grace_s = 0.0
        return self._end(error)

    # ---- phases of a life ---------------------------------------------------------------------------------------------

    def _start(self) -> bool:
        """Wait for the server. Returns False when the daemon says Exit first. Raises EngineError with the reason why it did not
        come up."""
        deadline = Deadline(START_S)
        while not self._server.serving():
            self._receive()
            if self._grace_s is not None:
                return False
            if deadline.passed:
                raise EngineError(
                    f"the {self._kind.title} server of run {self._config.run} did not answer within {START_S:.0f} s"
                )
        adapter = self._engine.adapter(self._server.socket, Deadline(_CALL_S))
        log(f"{self._kind.title} {adapter.version} serves run {self._config.run} on {self._server.socket}")
        self._capture(adapter)
        spec = self._config.spec
        self._pusher = Pusher(adapter, spec, model_name(self._config), self._server.folder / "adapters",
                              self._link.identity.instance, self._link.identity.spawn, self._hold.wait, log,
                              lambda: marks.read_latest(self._server.scratch))  # fmt: skip
        table = table_of(adapter, spec, self._engine.device(spec.engine), self._server.folder)
        ways, obstacle = transfers_of(spec, table, adapter.capabilities.own_transfer)
        if obstacle:
            log(f"no direct push: {obstacle}")
        if pays(table) and not self._warm(adapter, Deadline(min(WARM_S, deadline.left / 2))):
            return False
        self._pushing = threading.Thread(target=self._push_all, args=(self._pusher,), name="artd-push", daemon=True)
        self._pushing.start()
        if self._base is not None:
            self._base.verify()
        if self._config.stall_s:
            threading.Thread(target=self._watch_progress, name="artd-progress", daemon=True).start()
        reach("engine.started")
        self._link.send(w.Ready(socket=str(self._server.socket), transfers=ways, obstacle=obstacle))
        return True

    def _capture(self, adapter: Adapter) -> None:
        """Start capturing routes, when the run wants them, before any request comes."""
        if self._config.routes is None:
            return
        if adapter.capabilities.routes != self._engine.read_version().routes:
            raise EngineError(
                f"{self._kind.title} {adapter.version} tells routes by {adapter.capabilities.routes}, but was started for another "
                "version: the interpreter of the engine holds two of them, install its runtime again"
            )
        adapter.capture_routes(self._config.routes, Deadline(_CALL_S))

    def _warm(self, adapter: Adapter, deadline: Deadline) -> bool:
        """Warm the engine up. Returns False when the daemon says Exit meanwhile. Raises EngineError when the engine has died."""
        warming = threading.Thread(target=warm, args=(adapter, deadline, log), name="artd-warm", daemon=True)
        warming.start()
        while warming.is_alive() and not self._server.ended.is_set():
            self._receive()
            if self._grace_s is not None:
                return False
        if adapter.healthy(Deadline(_CALL_S)):
            return True
        gone = self._server.ended.wait(_TOLD_S)
        raise EngineError(self._server.death() if gone else "the engine does not answer after its warm-up")

    def _tell_progress(self) -> None:
        """Report a push's progress in heartbeats; the daemon ends an engine whose push makes none."""
        push, pusher = self._current, self._pusher
        told = None if push is None or pusher is None else (push.push, push.fence, pusher.progress())
        if told == self._told:
            return
        if told is None:
            self._link.idle()
        elif self._told is None or told[:2] != self._told[:2]:
            self._link.pushing(*told[:2])
        else:
            self._link.progress()
        self._told = told

    def _watch_progress(self) -> None:
        """End an engine that computes nothing for its requests (body of a thread)."""
        why = progress.watch(
            lambda: self._engine.work(self._server.socket),
            lambda: self._current is not None,
            self._config.stall_s,
            self._server.ended,
        )
        if why:
            self._broken = self._broken or why
            self._server.kill()

    def _serve(self) -> str:
        """Serve until the daemon says Exit (returns "") or the engine is lost (returns why)."""
        tidy_due = 0.0
        while self._grace_s is None:
            self._receive()
            self._tell_progress()
            if self._broken:
                return self._broken
            if self._server.ended.is_set():
                return self._server.death()
            if time.monotonic() >= tidy_due:
                self._tidy()
                tidy_due = time.monotonic() + _TIDY_S
        return ""

    def _end(self, error: str) -> int:
        if error:
            self._server.kill()
            self._hold.abort()
            if self._current is not None:  # the push's calls fail now, and it reports its phase
                self._pushing.join(_TOLD_S)
            cause = self._server.first_error()
            error += "" if cause in error else cause
            log(error)
        left = self._server.stop(0.0 if error else self._grace())
        if left:
            error = f"{error or 'the engine was stopped'}; processes {left} could not be ended"
        if error:
            self._link.send(w.Down(error=error, tail=self._server.tail()))
        shutil.rmtree(self._server.folder / "adapters", ignore_errors=True)
        self._link.close()
        return 1 if error else 0

    def _grace(self) -> float:
        return _DEFAULT_GRACE_S if self._grace_s is None else self._grace_s

    # ---- messages -----------------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        if (received := self._link.receive(_TICK_S)) is None:
            return
        message = received[0]
        match message:
            case w.Push():
                self._take(message)
            case w.Proceed():
                self._hold.proceed(message)
            case w.Unload() if self._pusher is not None:
                self._pusher.unload(message.name)
            case w.Exit():
                self._grace_s = message.grace_s
            case _:
                log(f"{type(message).__name__} is not a message for an engine worker")

    def _take(self, push: w.Push) -> None:
        running = self._current
        self._pushes.put(push)
        if running is not None and running.source == "live" and push.fence > running.fence:
            # The daemon has given up on that push, because its trainer refused or died. Nothing more will be sent, and
            # only a restart makes the engine's weights known again.
            self._broken = f"push {running.push} fence {running.fence} was replaced while it waited for the trainer"
            self._server.kill()

    def _on_signal(self, number: int, frame: object) -> None:
        self._grace_s = _DEFAULT_GRACE_S

    # ---- pushes -------------------------------------------------------------------------------------------------------

    def _push_all(self, pusher: Pusher) -> None:
        """Run pushes (body of the push thread) until the first one fails, after which no engine is left."""
        while not self._broken:
            push = self._pushes.get()
            self._current = push
            try:
                answer: w.Live | w.Refused = pusher.run(push)
            except Stale as error:
                log(str(error))
                answer = w.Refused(push=push.push, fence=push.fence, reason=str(error))
            except PushError as error:
                self._fail(push, error.phase, str(error))
                return
            except Exception as error:  # a bug of artd's must not leave an engine with unknown weights serving
                self._fail(push, pusher.phase, f"{type(error).__name__}: {error}")
                return
            self._current = None  # before the answer, because the daemon may send the next push at once
            self._link.send(answer)

    def _fail(self, push: w.Push, phase: str, error: str) -> None:
        if self._server.lost and self._server.ended.wait(_TOLD_S):
            error = f"{self._server.death()}; {error}"
        self._link.send(w.PushFailed(push=push.push, fence=push.fence, phase=phase, error=error))
        self._broken = self._broken or f"push of {push.name} failed in {phase}: {error}"
        self._server.kill()

    def _tidy(self) -> None:
        assert self._pusher is not None
        with contextlib.suppress(EngineError):  # the next tick tries again; the main loop notices a dead server
            for name in self._pusher.tidy(Deadline(_CALL_S)):
                log(f"unloaded {name}")


def log(text: str) -> None:
    """Print a line to the harness's own log; the supervisor keeps its stderr."""
    print(f"engine worker: {text}", file=sys.stderr, flush=True)


def remove_folder(config: EngineConfig) -> None:
    """Remove what is left of this spawn's folder; the log is elsewhere."""
    shutil.rmtree(Path(config.dir), ignore_errors=True)

"""A worker's link to the daemon: one DEALER socket in a thread of its own.

Heartbeats go on while the worker computes. A terminal report (`Staged`, `Failed`) is sent again until the daemon answers it.
The link never gives up on a silent daemon; when the daemon dies, the guardian ends the worker.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import zmq
from msgspec.structs import replace

from artd_schema import PROTOCOL
from artd_schema.codec import Codec
from artd_schema.wire import worker as w

Message = tuple[w.ToWorker, list[bytes]]
RESEND_S = 1.0
HELLO_TIMEOUT_S = 20.0
PAGE = os.sysconf("SC_PAGE_SIZE")


class Rejected(Exception):
    """The daemon refused this worker."""


class LinkClosed(Exception):
    """The daemon is gone, or told this worker to exit."""


@dataclass(frozen=True)
class Identity:
    """The name of this process, from the environment that the supervisor set."""

    socket: str
    instance: str
    name: str
    spawn: int
    build: str

    @classmethod
    def from_env(cls) -> Identity:
        needed = ("ARTD_SOCKET", "ARTD_INSTANCE", "ARTD_WORKER", "ARTD_SPAWN")
        missing = [key for key in needed if key not in os.environ]
        if missing:
            raise SystemExit(
                f"artd worker: {', '.join(missing)} not set; workers are started by `artd start`, not by hand"
            )
        env = os.environ
        socket, instance, name, spawn = (env[key] for key in needed)
        return cls(socket, instance, name, int(spawn), env.get("ARTD_BUILD", ""))


class Link:
    """The worker's end of the connection. Every public method may be called from any thread."""

    def __init__(self, kind: w.WorkerKind, identity: Identity, versions: dict[str, str] | None = None) -> None:
        self.kind = kind
        self.identity = identity
        self.on_message: Callable[[w.ToWorker, list[bytes]], None] | None = None
        self.closed = threading.Event()
        self._versions = versions or {}
        self._codec: Codec[w.ToWorker] = Codec(w.ToWorker)
        self._context = zmq.Context()
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        os.set_blocking(self._wake_read, False)
        self._beat = w.Beat()
        self._marking = threading.Lock()
        self._report: w.Staged | w.Failed | None = None
        self._report_due = 0.0
        self._stop = threading.Event()
        self._welcome: w.Welcome | None = None
        self._error: Exception | None = None
        self._welcomed = threading.Event()
        self._thread = threading.Thread(target=self._main, name="artd-link", daemon=True)

    @classmethod
    def from_env(cls, kind: w.WorkerKind, versions: dict[str, str] | None = None) -> Link:
        return cls(kind, Identity.from_env(), versions)

    def start(self) -> w.Welcome:
        """Send Hello and wait for Welcome. Raises Rejected, and LinkClosed when no daemon answers within 20 s."""
        self._thread.start()
        if not self._welcomed.wait(HELLO_TIMEOUT_S):
            self.close()
            raise LinkClosed(f"no answer from the daemon at {self.identity.socket} within {HELLO_TIMEOUT_S:.0f} s")
        if self._error is not None:
            raise self._error
        assert self._welcome is not None
        return self._welcome

    def send(self, message: w.FromWorker, bulk: Sequence[bytes] = ()) -> None:
        self._outbox.put(self._codec.encode(message, bulk))
        self._wake()

    def receive(self, timeout: float | None = None) -> Message | None:
        """Return the next message, None after `timeout` seconds. Raises LinkClosed."""
        try:
            message = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return None
        if message is None:
            raise LinkClosed("the daemon is gone")
        return message

    def report(self, message: w.Staged | w.Failed) -> None:
        """Send a terminal report, and again every second until Committed, Ack or Fenced answers it."""
        self._report, self._report_due = message, 0.0
        self._wake()

    def busy(self, job: int, fence: int) -> None:
        self._beat = w.Beat(job=job, fence=fence)

    def pushing(self, push: int, fence: int) -> None:
        """Report in heartbeats the push that this engine serves, as `busy` does for a job."""
        self._beat = w.Beat(push=push, fence=fence)

    def progress(self) -> None:
        """Count one more sign of progress of the present job or push."""
        with self._marking:
            self._beat = replace(self._beat, progress=self._beat.progress + 1)

    def idle(self) -> None:
        self._beat = w.Beat()

    def close(self) -> None:
        self._stop.set()
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(3.0)

    # ---- the link's thread --------------------------------------------------------------------------------------------

    def _wake(self) -> None:
        try:
            os.write(self._wake_write, b"\0")
        except BlockingIOError:
            return  # the pipe is full: the thread will wake anyway

    def _main(self) -> None:
        try:
            with self._connect() as socket:
                self._serve(socket)
        except Exception as error:
            self._error = error
        finally:
            self.closed.set()
            self._welcomed.set()
            self._inbox.put(None)
            self._context.destroy(linger=1000)

    def _serve(self, socket: zmq.Socket[bytes]) -> None:
        me = self.identity
        hello = w.Hello(kind=self.kind, name=me.name, instance=me.instance, protocol=PROTOCOL, spawn=me.spawn,
                        pid=os.getpid(), build=me.build, versions=self._versions)  # fmt: skip
        socket.send_multipart(self._codec.encode(hello))
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        beat_due = 0.0
        while not self._stop.is_set():
            period = self._welcome.heartbeat_s if self._welcome else 1.0
            events = dict(poller.poll(timeout=int(period * 500)))
            if self._wake_read in events:
                os.read(self._wake_read, 4096)
            if socket in events:
                self._drain(socket)
            now = time.monotonic()
            if self._welcome and now >= beat_due:
                socket.send_multipart(self._codec.encode(self._heartbeat()))
                beat_due = now + self._welcome.heartbeat_s
            self._flush(socket, now)
        self._flush(socket, time.monotonic())

    def _connect(self) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        # With the instance, so that a process of another data folder is not taken for the worker of this name and number.
        me = self.identity
        socket.setsockopt(zmq.IDENTITY, f"{me.name}:{me.spawn}:{me.instance}".encode())
        socket.setsockopt(zmq.LINGER, 1000)
        socket.connect(self.identity.socket)
        return socket

    def _heartbeat(self) -> w.Beat:
        return replace(self._beat, rss=resident())

    def _drain(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frames = socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(*self._codec.decode(frames))

    def _take(self, message: w.ToWorker, bulk: list[bytes]) -> None:
        if isinstance(message, w.Welcome):
            self._welcome = message
            self._welcomed.set()
            return
        if isinstance(message, w.Reject):
            raise Rejected(message.reason)
        self._settle(message)
        if self.on_message is not None:
            self.on_message(message, bulk)
        else:
            self._inbox.put((message, bulk))

    def _settle(self, message: w.ToWorker) -> None:
        report = self._report
        # A Fenced before the report was sent answers a heartbeat. The daemon still needs the report, which proves that nothing more is written.
        if report is None or not self._report_due or not isinstance(message, w.Committed | w.Ack | w.Fenced):
            return
        if (message.job, message.fence) == (report.job, report.fence):
            self._report = None

    def _flush(self, socket: zmq.Socket[bytes], now: float) -> None:
        while not self._outbox.empty():
            socket.send_multipart(self._outbox.get())
        if self._report is not None and now >= self._report_due:
            socket.send_multipart(self._codec.encode(self._report))
            self._report_due = now + RESEND_S


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * PAGE

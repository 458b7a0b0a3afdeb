"""The daemon's end of its sockets, for tests of who talks to it: `ClientDaemon` answers clients, `WorkerDaemon` starts a worker.

Both run in every interpreter of artd: nothing here imports more than the schema, zmq and the standard library.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import zmq

from artd.supervise import procfs
from artd_schema import PROTOCOL, paths
from artd_schema.codec import Codec
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from tests.awake import SOON_S

ROOT = Path(__file__).resolve().parents[1]
INSTANCE, SPAWN = "test-instance", 7
RUN = api.RunInfo(
    name="r", state="active", reason="", spec=RunSpec(model="/m"), step=-1, served=-1, created=True,
    base_url="http://127.0.0.1:9/v1", api_key="secret",
)  # fmt: skip


# ---- clients --------------------------------------------------------------------------------------------------------


def usual(op: api.Op) -> Any:
    """The answer of a daemon that has nothing to object to."""
    match op:
        case api.CreateRun():
            return RUN
        case api.Submit():
            return api.Submitted(trajectory=1, duplicate=False, group_state="open")
        case api.Seal():
            return api.GroupInfo(group=op.group, state="sealed", size=8)
        case api.List() | api.Events():
            return api.Rows(rows=[])
        case _:
            return api.Done()


class ClientDaemon:
    """A ROUTER in a thread, which greets clients and then calls the test's `handle`.

    handle(op) -> answer, None (no answer), or a list of answers. seen: (peer, number, op, bulk) of all but Hello. Use as a context
    manager, or `start` and `close`.
    """

    def __init__(self, data: Path, handle: Callable[[api.Op], Any] = usual, max_message: int = 1 << 20) -> None:
        self.data = data
        self.handle = handle
        self.seen: list[tuple[bytes, int, Any, list[bytes]]] = []
        self.hellos: list[bytes] = []
        self.greeting: Callable[[api.Hello], Any] = lambda hello: api.Welcome(
            protocol=PROTOCOL, instance="i", version="0", max_message=max_message
        )
        self._folder = Path(tempfile.mkdtemp(prefix="artd"))
        self.endpoint = f"ipc://{self._folder}/c"
        self._thread: threading.Thread | None = None
        self._late: list[list[bytes]] = []

    def announce(self, **changes: Any) -> None:
        told = {"pid": os.getpid(), "ticks": paths.process_ticks(os.getpid()), "boot_id": paths.boot_id(),
                "version": "0", "state": "ready", "socket": self.endpoint, **changes}  # fmt: skip
        self.data.mkdir(exist_ok=True)
        paths.write_daemon_file(self.data, paths.DaemonFile(**told))

    def start(self, announce: bool = True) -> ClientDaemon:
        self._folder.mkdir(exist_ok=True)
        self._halt = threading.Event()
        bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(bound,))
        self._thread.start()
        bound.wait(5)
        if announce:
            self.announce()
        return self

    def die(self) -> None:
        """Go without a word, as by kill -9; daemon.json stays."""
        if self._thread is not None:
            self._halt.set()
            self._thread.join()
            self._thread = None

    def close(self) -> None:
        self.die()
        shutil.rmtree(self._folder, ignore_errors=True)

    def send_late(self, peer: bytes, number: int, answer: Any) -> None:
        """Have a reply sent at the thread's next turn."""
        self._late.append([peer, *Codec(api.Reply).encode(api.Reply(id=number, answer=answer))])

    def __enter__(self) -> ClientDaemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.close()

    def ops(self, kind: type) -> list[Any]:
        return [op for _, _, op, _ in self.seen if isinstance(op, kind)]

    def _serve(self, bound: threading.Event) -> None:
        codec: Codec[api.Request] = Codec(api.Request)
        context = zmq.Context()
        socket = context.socket(zmq.ROUTER)
        socket.linger = 0
        socket.bind(self.endpoint)
        bound.set()
        while not self._halt.is_set():
            while self._late:
                socket.send_multipart(self._late.pop(0))
            if not socket.poll(5):
                continue
            peer, *frames = socket.recv_multipart()
            request, bulk = codec.decode(frames)
            if isinstance(request.op, api.Hello):
                self.hellos.append(peer)
                answers = self.greeting(request.op)
            else:
                self.seen.append((peer, request.id, request.op, bulk))
                answers = self.handle(request.op)
            for answer in answers if isinstance(answers, list) else [answers]:
                if isinstance(answer, bytes):
                    socket.send_multipart([peer, answer, b"junk"])
                elif answer is not None:
                    socket.send_multipart([peer, *codec.encode(api.Reply(id=request.id, answer=answer))])
        context.destroy(0)


# ---- workers --------------------------------------------------------------------------------------------------------


class WorkerDaemon:
    """A ROUTER that starts one worker process at a time, welcomes it and keeps what it says. Use as a context manager, or `close`.

    received, beats: every message of every process, oldest first. holds: whether a push that wants to pause hears `Proceed`; it does
    while the test listens (`expect`, `take`, `hear`, `wait`).
    """

    def __init__(self, socket: Path, heartbeat_s: float = 0.5, **config: Any) -> None:
        """config: the worker's part of the Welcome, as `engine=…` or `trainer=…`."""
        self.config = config
        self.heartbeat_s = heartbeat_s
        self.received: list[Any] = []
        self.beats: list[w.Beat] = []
        self.holds = True
        self.process: subprocess.Popen[bytes] | None = None
        self._untaken: list[Any] = []
        self._codec: Codec[Any] = Codec(w.FromWorker)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._endpoint = f"ipc://{socket}"
        self._router.bind(self._endpoint)
        self._peer = b""

    def __enter__(self) -> WorkerDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def launch(
        self, name: str, module: str, spawn: int, python: str = sys.executable, env: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:  # fmt: skip
        """Start the worker `name` as `python -m module`, in a session of its own."""
        tags = {
            "ARTD_SOCKET": self._endpoint, "ARTD_WORKER": name, "ARTD_SPAWN": str(spawn), "ARTD_INSTANCE": INSTANCE,
            "ARTD_BOOT": "b", "ARTD_BUILD": "x", "PYTHONPATH": f"{ROOT / 'workers'}:{ROOT / 'schema'}",
        }  # fmt: skip
        self._untaken.clear()
        self.process = subprocess.Popen(
            [python, "-m", module], env=os.environ | tags | dict(env or {}), stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip

    def close(self) -> None:
        """End the worker and what is left of its session."""
        if self.process is not None:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait(SOON_S)
            procfs.strike(self._members(), signal.SIGKILL)
        self._context.destroy(linger=0)

    def _members(self) -> list[procfs.Stat]:
        assert self.process is not None
        return [stat for stat in procfs.all_stats() if stat.session == self.process.pid and not stat.dead]

    # ---- messages -----------------------------------------------------------------------------------------------------

    def send(self, message: Any) -> None:
        self._router.send_multipart([self._peer, *self._codec.encode(message)])

    def expect(self, kind: Any, timeout_s: float = SOON_S, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """Return the next message of a kind that comes from now on. Raises AssertionError."""
        end = time.monotonic() + timeout_s
        gone = False
        while time.monotonic() < end:
            message = self._next(0.05)
            if isinstance(message, kind) and where(message):
                return message
            if message is None and gone:
                break
            gone = self.process is not None and self.process.poll() is not None
        raise AssertionError(f"no {kind} within {timeout_s} s; received {self.received[-5:]}")

    def take(self, kind: Any, timeout_s: float = SOON_S) -> Any:
        """Return the oldest message of a kind that nobody took yet, of the newest process. Raises AssertionError."""
        end = time.monotonic() + timeout_s
        while True:
            for index, message in enumerate(self._untaken):
                if isinstance(message, kind):
                    return self._untaken.pop(index)
            assert time.monotonic() < end, f"no {kind} within {timeout_s} s; received {self.received[-5:]}"
            self._next(0.1)

    def drop(self, kind: type[Any]) -> None:
        """Forget the messages of a kind that nobody took."""
        self._untaken = [message for message in self._untaken if not isinstance(message, kind)]

    def ready(self, timeout_s: float = SOON_S) -> str:
        """Return the engine's socket, when it says Ready."""
        return self.expect(w.Ready, timeout_s).socket

    def hear(self, seconds: float) -> None:
        """Take what comes in this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._next(left)

    def wait(self, timeout_s: float = SOON_S) -> int:
        """Return the exit status of the worker, when it has ended and all that it said is here."""
        assert self.process is not None
        end = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the worker still runs after {timeout_s} s"
            self._next(0.05)
        while self._next(0.05) is not None:
            pass
        return self.process.returncode

    def _next(self, timeout_s: float) -> Any:
        """Return what comes next, None when nothing does."""
        if not self._router.poll(timeout_s * 1000):
            return None
        self._peer, *frames = self._router.recv_multipart()
        message, _ = self._codec.decode(frames)
        if isinstance(message, w.Hello):
            limits = {"heartbeat_s": self.heartbeat_s, "max_message": 1 << 26}
            self.send(w.Welcome(worker=message.name, **limits, **self.config))
        if isinstance(message, w.Pausing) and self.holds:
            self.send(w.Proceed(push=message.push, fence=message.fence))
        if isinstance(message, w.Beat):
            self.beats.append(message)
        else:
            self.received.append(message)
            self._untaken.append(message)
        return message


def start_engine(
    config: EngineConfig, python: str = sys.executable, env: Mapping[str, str] | None = None, spawn: int = SPAWN,
    harness: str = "artd_workers.engines",
) -> WorkerDaemon:  # fmt: skip
    """Start `python -m artd_workers.engines`, or another `harness`, beside its folder."""
    daemon = WorkerDaemon(Path(config.dir).parent / "daemon", engine=config)
    calm = {"SPT_NOENV": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    daemon.launch("engine-toy", harness, spawn, python, calm | dict(env or {}))
    return daemon

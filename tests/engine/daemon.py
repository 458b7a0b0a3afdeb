"""The daemon's end of an engine worker, for tests: a ROUTER that welcomes one harness and records what it says."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from artd.supervise import procfs
from artd_schema.codec import Codec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from tests.awake import SOON_S
from tests.process.helpers import session_members

ROOT = Path(__file__).resolve().parents[2]
INSTANCE, SPAWN = "test-instance", 7


class FakeDaemon:
    """Starts `python -m artd_workers.engines`, or another `harness`, and talks to it. Use as a context manager: it leaves no process. holds: whether
    it says `Proceed` to a push that wants to pause; it does so while it hears."""

    def __init__(
        self,
        config: EngineConfig,
        python: str = sys.executable,
        env: dict[str, str] | None = None,
        spawn: int = SPAWN,
        harness: str = "artd_workers.engines",
    ) -> None:
        self.config = config
        self.received: list[w.FromWorker] = []
        self.beats: list[w.FromWorker] = []
        self.holds = True
        self._codec: Codec[w.FromWorker] = Codec(w.FromWorker)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._peer = b""
        path = Path(config.dir).parent / "daemon"
        self._socket.bind(f"ipc://{path}")
        tags = {"ARTD_SOCKET": f"ipc://{path}", "ARTD_INSTANCE": INSTANCE, "ARTD_BOOT": "b", "ARTD_SPAWN": str(spawn),
                "ARTD_WORKER": "engine-toy", "SPT_NOENV": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0",
                "PYTHONPATH": f"{ROOT / 'workers'}:{ROOT / 'schema'}"}  # fmt: skip
        self.process = subprocess.Popen(
            [python, "-m", harness], env=os.environ | tags | (env or {}), start_new_session=True
        )

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(SOON_S)
            procfs.strike(session_members(self.process.pid), signal.SIGKILL)  # its server's children
        self._context.destroy(linger=0)

    def send(self, message: w.ToWorker) -> None:
        self._socket.send_multipart([self._peer, *self._codec.encode(message)])

    def expect(self, kind: Any, timeout_s: float = SOON_S, where: Callable[[Any], bool] = lambda _: True) -> Any:
        """The next message of this kind (older ones of other kinds are kept in `received`)."""
        end = time.monotonic() + timeout_s
        gone = False
        while time.monotonic() < end:
            message = self._next(0.05)
            if isinstance(message, kind) and where(message):
                return message
            if message is None and gone:
                break
            gone = self.process.poll() is not None
        raise AssertionError(f"no {kind} within {timeout_s} s; received {self.received[-5:]}")

    def ready(self, timeout_s: float = SOON_S) -> str:
        """The engine's socket, once it says Ready."""
        return self.expect(w.Ready, timeout_s).socket

    def hear(self, seconds: float) -> None:
        """Take what comes in this time."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._next(left)

    def wait(self, timeout_s: float = SOON_S) -> int:
        """Exit code of the harness."""
        end = time.monotonic() + timeout_s
        while self.process.poll() is None:
            assert time.monotonic() < end, f"the harness still runs after {timeout_s} s"
            self._next(0.05)
        while self._next(0.05) is not None:
            pass
        return self.process.returncode

    def _next(self, timeout_s: float) -> w.FromWorker | None:
        if not self._socket.poll(timeout_s * 1000):
            return None
        self._peer, *frames = self._socket.recv_multipart()
        message, _ = self._codec.decode(frames)
        if isinstance(message, w.Hello):
            self.send(w.Welcome(worker=message.name, heartbeat_s=0.5, max_message=1 << 26, engine=self.config))
        if isinstance(message, w.Pausing) and self.holds:
            self.send(w.Proceed(push=message.push, fence=message.fence))
        (self.beats if isinstance(message, w.Beat) else self.received).append(message)
        return message

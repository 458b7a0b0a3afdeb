"""A daemon that does what a test says: a ROUTER in a thread, which greets and then calls the test's `handle`."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from artd_schema import PROTOCOL, paths
from artd_schema.codec import Codec
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from tests import awake

RUN = api.RunInfo(
    name="r", state="active", reason="", spec=RunSpec(model="/m"), step=-1, served=-1, created=True,
    base_url="http://127.0.0.1:9/v1", api_key="secret",
)  # fmt: skip

until = functools.partial(awake.until, seconds=5.0)


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


class FakeDaemon:
    """handle(op) -> answer, None (no answer), or a list of answers. seen: (peer, number, op, bulk) of all but Hello."""

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

    def start(self, announce: bool = True) -> FakeDaemon:
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

    def send_late(self, peer: bytes, number: int, answer: Any) -> None:
        """Have a reply sent at the thread's next turn."""
        self._late.append([peer, *Codec(api.Reply).encode(api.Reply(id=number, answer=answer))])

    def __enter__(self) -> FakeDaemon:
        return self.start()

    def __exit__(self, *exc: object) -> None:
        self.die()
        shutil.rmtree(self._folder, ignore_errors=True)

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

"""harness: a worker's link to its daemon, against a ROUTER of the test's own."""

from __future__ import annotations

import threading
from pathlib import Path

import zmq

from artd_schema import worker as w
from artd_schema.codec import Codec
from artd_workers.harness import Identity, Link

BEAT_S = 0.05
CODEC: Codec[w.FromWorker] = Codec(w.FromWorker)


class Daemon:
    """Welcomes one worker and answers what `answer` says; keeps what came."""

    def __init__(self, folder: Path) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(f"ipc://{folder / 's'}")
        self.peer = b""

    def take(self) -> w.FromWorker:
        assert self.socket.poll(5000), "nothing came within 5 s"
        self.peer, *frames = self.socket.recv_multipart()
        return CODEC.decode(frames)[0]

    def until(self, kind: type) -> w.FromWorker:
        """The next message of this kind."""
        while not isinstance(message := self.take(), kind):
            pass
        return message

    def send(self, message: w.ToWorker) -> None:
        self.socket.send_multipart([self.peer, *CODEC.encode(message)])

    def welcome(self, link: Link) -> w.FromWorker:
        starter = threading.Thread(target=link.start)
        starter.start()
        hello = self.take()
        self.send(w.Welcome(worker="trainer", heartbeat_s=BEAT_S, max_message=1 << 20))
        starter.join()
        return hello

    def close(self, link: Link) -> None:
        link.close()
        self.context.destroy(linger=0)


def make(tmp_path: Path) -> tuple[Daemon, Link]:
    daemon = Daemon(tmp_path)
    return daemon, Link("trainer", Identity(f"ipc://{tmp_path / 's'}", "inst", "trainer", 4, "b"))


def test_hello_says_whose_it_is_and_heartbeats_follow_at_once(tmp_path: Path) -> None:
    daemon, link = make(tmp_path)
    try:
        hello = daemon.welcome(link)
        assert isinstance(hello, w.Hello) and (hello.instance, hello.name, hello.spawn) == ("inst", "trainer", 4)
        assert daemon.peer == b"trainer:4:inst"
        daemon.take()
        assert daemon.socket.poll(10 * BEAT_S * 1000), "the second heartbeat of a short lease must not come late"
    finally:
        daemon.close(link)


def test_an_answer_to_a_heartbeat_does_not_keep_a_report_from_being_sent(tmp_path: Path) -> None:
    daemon, link = make(tmp_path)
    try:
        daemon.welcome(link)
        link.busy(7, 1)
        fenced, report = w.Fenced(job=7, fence=1), w.Failed(job=7, fence=1, failure="interrupted", error="e")
        link._report = report  # as if the link's thread had not come round to it
        daemon.send(fenced)
        assert link.receive(5.0) is not None
        assert daemon.until(w.Failed) == report
        daemon.send(fenced)
        assert link.receive(5.0) is not None
        assert link._report is None
    finally:
        daemon.close(link)

"""harness: a worker's link to its daemon, against a ROUTER of the test's own."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import zmq

from artd_schema.codec import Codec
from artd_schema.wire import worker as w
from artd_workers.daemon_link import Identity, Link
from tests.awake import SOON_S

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
        assert self.socket.poll(SOON_S * 1000), f"nothing came within {SOON_S} s"
        self.peer, *frames = self.socket.recv_multipart()
        return CODEC.decode(frames)[0]

    def until(self, kind: type) -> Any:
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


def test_hello_says_whose_it_is(tmp_path: Path) -> None:
    daemon, link = make(tmp_path)
    try:
        hello = daemon.welcome(link)
        assert isinstance(hello, w.Hello) and (hello.instance, hello.name, hello.spawn) == ("inst", "trainer", 4)
        assert daemon.peer == b"trainer:4:inst"
    finally:
        daemon.close(link)


def test_the_second_heartbeat_of_a_short_lease_does_not_come_late(tmp_path: Path) -> None:
    """A busy machine may delay that of one link; a link that sleeps too long delays it every time."""

    def in_time(folder: Path) -> bool:
        folder.mkdir()
        daemon, link = make(folder)
        try:
            daemon.welcome(link)
            daemon.until(w.Beat)
            return bool(daemon.socket.poll(5 * BEAT_S * 1000))
        finally:
            daemon.close(link)

    assert any(in_time(tmp_path / str(number)) for number in range(8))


def test_heartbeats_tell_how_often_the_job_made_progress(tmp_path: Path) -> None:
    """Whichever threads say so: files are written beside each other. The next job begins at nothing."""
    daemon, link = make(tmp_path)

    def told(job: int) -> int:
        while (beat := daemon.until(w.Beat)).job != job:
            pass
        return beat.progress

    try:
        daemon.welcome(link)
        link.busy(7, 1)
        assert told(7) == 0
        threads = [threading.Thread(target=lambda: [link.progress() for _ in range(1000)]) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        while (made := told(7)) < 8000:
            pass
        assert made == 8000
        link.busy(8, 1)
        assert told(8) == 0
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
        assert link.receive(SOON_S) is not None
        assert daemon.until(w.Failed) == report
        daemon.send(fenced)
        assert link.receive(SOON_S) is not None
        assert link._report is None
    finally:
        daemon.close(link)

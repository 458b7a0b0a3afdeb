"""Steering verbs against a scripted daemon: what is sent, and how its answers become exit codes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from artd.cli.artctl import act
from artd_schema import PROTOCOL
from artd_schema.codec import Codec
from artd_schema.wire import client_api as api
from tests.cli.conftest import Call, FakeDaemon
from tests.cli.rows import SPEC, Made

Answers = Callable[[api.Op], api.Answer | None]


class Scripted:
    """A ROUTER in a thread. answer: called for every op but Hello and CreateRun; None = say nothing."""

    def __init__(self, path: Path) -> None:
        self.seen: list[api.Op] = []
        self.answer: Answers = lambda op: api.Done()
        self.endpoint = f"ipc://{path}"
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.bind(self.endpoint)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        codec: Codec[api.Request] = Codec(api.Request)
        while not self._stop.is_set():
            if self._socket.poll(20):
                peer, *frames = self._socket.recv_multipart()
                request, _ = codec.decode(frames)
                if (answer := self._reply(request.op)) is not None:
                    self._socket.send_multipart([peer, *codec.encode(api.Reply(id=request.id, answer=answer))])

    def _reply(self, op: api.Op) -> api.Answer | None:
        if isinstance(op, api.Hello):
            return api.Welcome(protocol=PROTOCOL, instance="i", version="9.9.9", max_message=1 << 20)
        if isinstance(op, api.CreateRun):
            spec = api.RunSpec(model=SPEC["model"])
            return api.RunInfo(
                name=op.name,
                state="active",
                reason="",
                spec=spec,
                step=2,
                served=2,
                created=False,
                base_url="",
                api_key="",
                lineage=3,
            )
        self.seen.append(op)
        return self.answer(op)

    def close(self) -> None:
        self._stop.set()
        self._thread.join()
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def scripted(daemon: FakeDaemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    server = Scripted(tmp_path_factory.mktemp("s") / "c.sock")
    daemon.tell("ready", socket=server.endpoint)
    yield server
    server.close()


SENT = [
    (("cancel", "4"), api.CancelJob(job=4), "job 4 will not run again"),
    (("discard", "4"), api.DiscardJob(job=4), "job 4 and its batch are discarded"),
    (("discard-group", "toy", "g"), api.DiscardGroup(run="toy", group="g"), "group g is discarded"),
    (("retry", "4"), api.RetryJob(job=4), "job 4 is queued again"),
    (("rollback", "toy@1"), api.Rollback(run="toy", step=1, lineage=3), "toy@1 is the newest step again"),
    (("pause",), api.Pause(run="toy", reason="operator"), "run toy is paused"),
    (("pause", "toy", "--reason", "lunch"), api.Pause(run="toy", reason="lunch"), "run toy is paused"),
    (("resume", "toy"), api.Resume(run="toy"), "run toy is active"),
    (
        ("set", "toy", "optimizer.lr=1e-6", "loss.kl=null", "optimizer.schedule.kind=cosine"),
        api.UpdateRun(
            run="toy", changes={"optimizer": {"lr": 1e-6, "schedule": {"kind": "cosine"}}, "loss": {"kl": None}}
        ),
        "run toy learns with it from its next batch on",
    ),
    (("finish", "toy"), api.Finish(run="toy"), "run toy is finished"),
    (("delete", "toy", "--yes"), api.DeleteRun(run="toy"), "run toy is deleted; its files go by themselves"),
]


@pytest.mark.parametrize(("words", "op", "says"), SENT)
def test_what_is_sent(
    words: tuple[str, ...], op: api.Op, says: str, made: Made, scripted: Scripted, artctl: Call
) -> None:
    code, out, err = artctl(*words)
    assert (code, out, err) == (0, "", f"{says}\n")
    seen = [msgspec.structs.replace(op, request="") if isinstance(op, api.Order) else op for op in scripted.seen]
    assert seen == [op]


def test_every_verb_is_seen_to_send_its_order() -> None:
    assert {words[0] for words, _, _ in SENT} == set(act.ACTS) == set(act.VERBS)


@pytest.mark.parametrize(("word", "code"), [("conflict", 6), ("not_found", 5), ("failed", 1)])
def test_errors_of_the_daemon(word: str, code: int, made: Made, scripted: Scripted, artctl: Call) -> None:
    scripted.answer = lambda op: api.Error(code=word, message="job 4 is running: wait for it")
    found, out, err = artctl("retry", "4")
    assert (found, out) == (code, "")
    assert err.startswith("error: job 4 is running: wait for it\nnext: artctl status")


def test_a_daemon_that_is_stopping_is_waited_for(made: Made, scripted: Scripted, artctl: Call) -> None:
    scripted.answer = lambda op: api.Error(code="draining", message="the daemon is stopping")
    code, _, err = artctl("retry", "4", "--timeout", "0.3")
    assert (code, err.splitlines()[0]) == (1, "error: the daemon is stopping") and len(scripted.seen) == 1


def test_no_answer(made: Made, scripted: Scripted, artctl: Call) -> None:
    scripted.answer = lambda op: None
    code, _, err = artctl("retry", "4", "--timeout", "0.3")
    assert code == 7 and err.startswith("error: ")


def test_names_are_checked_before_anything_is_sent(made: Made, scripted: Scripted, artctl: Call) -> None:
    assert artctl("retry", "77")[0] == 5
    assert artctl("resume", "toi")[0] == 5
    assert artctl("rollback", "toi@1")[0] == 5
    assert artctl("rollback", "toy")[0] == artctl("rollback", "toy@x")[0] == 2
    assert artctl("finish")[0] == 2, "what cannot be undone is named in full"
    assert scripted.seen == []


def test_a_run_is_not_deleted_unless_somebody_said_so(made: Made, scripted: Scripted, artctl: Call) -> None:
    """A script has nobody to ask."""
    code, _, err = artctl("delete", "toy")
    assert code == 2 and "next: artctl delete toy --yes" in err
    assert artctl("delete")[0] == 2 and scripted.seen == []


def test_without_a_daemon(made: Made, artctl: Call) -> None:
    for words in (
        ("cancel", "4"),
        ("discard", "4"),
        ("retry", "4"),
        ("pause",),
        ("finish", "toy"),
        ("rollback", "toy@1"),
    ):
        code, _, err = artctl(*words)
        assert code == 3 and "next: artd start --detach" in err

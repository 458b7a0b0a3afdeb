"""A harness that is stopped in the middle of a push, replaced and woken: it cannot touch the engine that came after it.

Nothing kills it here, as if it ran where nobody can. Its socket lies in the folder of its own spawn, which no other engine
ever has. Even when the path is made to lead to the new engine, it is refused: by the fence of the extension in the worker, and
at vLLM's own routes by the guard in the API server (both are the real ones, in the fake server).
"""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd_schema.paths import process_ticks
from artd_schema.wire import worker as w
from artd_workers.deadline import Deadline
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.awake import SOON_S, wait_until
from tests.engine import folders
from tests.engine.conftest import Bench
from tests.fake_daemon import SPAWN, WorkerDaemon

LAST = {
    "/pause": "artd_begin",
    "artd_begin": "artd_load_merged",
    "artd_finish": "/update_weight_version",
    "/init_weight_transfer_engine": "/start_weight_update",
}
"""The call at which a harness is stopped (the engine has done it), and the one that it makes when it is woken."""


@pytest.fixture
def newer() -> Iterator[Bench]:
    """The engine's next spawn."""
    with tempfile.TemporaryDirectory(prefix="artd-e-") as folder:
        os.chmod(folder, 0o700)
        made = Bench(Path(folder), spawn=SPAWN + 1, fences=1)
        yield made
        made.shm.unlink(missing_ok=True)


def serve(daemon: WorkerDaemon, push: w.Push) -> str:
    """Bring the push to live; the engine's socket."""
    socket = daemon.ready()
    daemon.send(push)
    daemon.expect(w.Live)
    return socket


def holds(socket: str, step: int) -> bool:
    """Whether the engine's replies are those of this checkpoint."""
    found = VllmAdapter(Path(socket), Deadline(SOON_S), "").score("toy", folders.PROMPTS, Deadline(SOON_S))
    return found == [folders.scores(folders.merged_seed(step), prompt) for prompt in folders.PROMPTS]


@pytest.mark.parametrize(
    ("at", "led"),
    [
        ("/pause", False),
        ("artd_finish", True),
        *(
            pytest.param(at, True, marks=pytest.mark.slow)
            for at in ("/pause", "artd_begin", "/init_weight_transfer_engine")
        ),
    ],
)
def test_a_harness_that_wakes_after_its_replacement(bench: Bench, newer: Bench, at: str, led: bool) -> None:
    go = bench.root / "go"
    bench.script = {"faults": {at: str(go)}}
    source = {"source": "live", "rendezvous": "r"} if at.startswith("/init") else {}
    with bench.start() as old, newer.start() as new:
        own = Path(old.ready())
        # Its fence is the greater one, as that of another instance may be.
        old.send(bench.push(0, fence=100, drain_s=30.0, **source))
        old.expect(w.Pausing)
        wait_until(lambda: at in bench.routes(), what=at)
        ticks = process_ticks(old.process.pid)
        old.process.send_signal(signal.SIGSTOP)
        socket = serve(new, newer.push(1))
        assert holds(socket, 1)
        seen = newer.routes()
        if led:
            own.unlink()
            own.symlink_to(socket)
        go.touch()
        old.process.send_signal(signal.SIGCONT)
        if led:
            failed = old.expect(w.PushFailed)
            assert "belongs to instance" in failed.error
            assert old.wait() == 1
            assert newer.routes() == [*seen, LAST[at]], "one call, which was refused"
        else:
            old.expect(w.Live)  # of its own engine, which nobody is routed to
            assert process_ticks(old.process.pid) == ticks
            assert newer.routes() == seen
        assert holds(socket, 1)
        new.send(newer.push(2))
        assert new.expect(w.Live).fence == 3
        assert holds(socket, 2)

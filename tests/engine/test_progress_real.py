"""The real vLLM, whose EngineCore is stopped: its API server answers on, and the harness ends it."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd_schema.wire import worker as w
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.process import marks
from artd_workers.engines.vllm import work
from tests.awake import SOON_S
from tests.engine.real import HERE, Engine, start, tool
from tests.fake_daemon import ROOT

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.timeout(600)]
STALL_S = 15.0


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        folder = Path(name)
        tool(str(ROOT / "tests" / "toys.py"), str(folder / "toy"), "--family", "qwen3")
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), f"{folder}/m0:merged:1:0")
        yield from start(folder, "merged", stall_s=STALL_S)


def test_an_engine_core_that_never_took_up_a_request_is_ended(engine: Engine) -> None:
    engine.live(engine.push("m0"))
    assert marks.read_latest(Path(engine.socket).parent / "t") > 0  # the real loader left its marks
    before = work.ask(Path(engine.socket))
    engine.generate([5, 6, 7], max_tokens=32)
    after = work.ask(Path(engine.socket))
    assert (before.requests, after.requests) == (0, 0) and before.mark != after.mark  # real metrics, real middleware
    (core,) = [pid for pid in engine.pids() if "EngineCor" in Path(f"/proc/{pid}/comm").read_text()]
    os.kill(core, signal.SIGSTOP)
    said: list[str] = []

    def ask() -> None:
        try:
            engine.call("/inference/v1/generate", {"model": "toy", "token_ids": [5], "sampling_params": {}}, 120.0)
        except EngineError as error:
            said.append(str(error))

    waiting = threading.Thread(target=ask)
    waiting.start()
    down = engine.daemon.expect(w.Down, STALL_S + SOON_S)
    waiting.join()
    assert "computed no token for" in down.error and "while 1 requests waited" in down.error and said
    assert engine.daemon.wait() == 1
    engine.nothing_left(5.0)

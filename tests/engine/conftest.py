"""Fixtures of the engine's fast tests: a harness under a fake daemon, with the fake server as its engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from artd.supervise import procfs
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, LoraSpec, Mode, Parameters, RunSpec
from artd_schema.wire import worker as w
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import EngineError
from artd_workers.engines.push import Pusher
from artd_workers.engines.vllm import guard
from artd_workers.engines.vllm.adapter import VllmAdapter
from tests.awake import SOON_S
from tests.engine import folders
from tests.engine.real import HERE, tool
from tests.fake_daemon import INSTANCE, SPAWN, WorkerDaemon, start_engine
from tests.fakes import driver

FAKE = Path(__file__).with_name("fake_vllm.py")
CHANGES = {"mlp_only_layers": [1], "tie_word_embeddings": True}


@dataclass
class Bench:
    """One harness with a fake server. root: a short path of its own (a socket path has 107 bytes); gpus: how many the driver shows a
    harness whose engine is to be on one."""

    root: Path
    mode: Mode = "merged"
    parameters: Parameters = "lora"
    shape: RouteShape | None = None
    script: dict[str, Any] = field(default_factory=dict)
    fences: int = 0
    python: str = ""
    folder: str = "e"
    spawn: int = SPAWN
    engine: dict[str, Any] = field(default_factory=dict)
    gpus: int = 1
    stall_s: float = 0.0

    @property
    def shm(self) -> Path:
        return Path(f"/dev/shm/psm_artd_test_{self.root.name}")

    def prepare(self) -> None:
        """Write the script and the fake interpreter; set `config`."""
        script = {"calls": str(self.root / "calls"), "shm": str(self.shm)} | self.script
        (self.root / "script").write_text(json.dumps(script))
        python = self.root / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
        python.chmod(0o700)
        spec = RunSpec(model=str(self.root / "model"), parameters=self.parameters, rollout_weights_mode=self.mode,
                       lora=LoraSpec(rank=4, alpha=8), engine=EngineSpec(max_model_len=64, **self.engine))  # fmt: skip
        self.config = EngineConfig(
            run="toy",
            spec=spec,
            dir=str(self.root / self.folder),
            log=str(self.root / "engine.log"),
            python=self.python or str(python),
            routes=self.shape,
            stall_s=self.stall_s,
        )

    def start(self) -> WorkerDaemon:
        """A harness process with a fake server."""
        self.prepare()
        wanted = self.config.spec.engine.device == "cuda"
        met = driver.environment(self.root / "driver", self.gpus) if wanted else {}
        return start_engine(self.config, env={"FAKE_VLLM": str(self.root / "script")} | met, spawn=self.spawn)

    @contextmanager
    def serve(self) -> Iterator[Pusher]:
        """A fake server without harness, and a pusher to it in this process."""
        self.prepare()
        tags = {"ARTD_INSTANCE": INSTANCE, "ARTD_SPAWN": str(SPAWN)}
        env = os.environ | tags | {"FAKE_VLLM": str(self.root / "script")}
        socket = self.root / "s"
        argv = [self.config.python, "-m", "module", "--uds", str(socket)]
        with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, process_group=0) as process:
            try:
                adapter = _adapter(socket)
                yield Pusher(adapter, self.config.spec, "toy", self.root / "adapters", INSTANCE, SPAWN, lambda *_: None)
            finally:
                os.killpg(process.pid, signal.SIGKILL)

    def push(self, step: int, **changes: Any) -> w.Push:
        """A push of checkpoint `step`, which is written if it is not there; every call has the next fence."""
        self.fences += 1
        folder = self.root / f"checkpoint-{step}"
        if not folder.exists():
            folders.write(folder, self.mode, step, self.parameters)
        ref = w.CheckpointRef(run="toy", step=step, epoch=step, lineage=0, sha=folders.sha(folder), dir=str(folder))
        values = {"push": self.fences, "fence": self.fences, "checkpoint": ref, "mode": self.mode, "source": "disk",
                  "name": f"toy@{step}", "drain_s": 0.3, "deadline_s": 30.0}  # fmt: skip
        return w.Push(**(values | changes))

    def calls(self) -> list[dict[str, Any]]:
        path = self.root / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def routes(self) -> list[str]:
        return [call["route"] for call in self.calls()]

    def server(self) -> dict[str, Any]:
        """Arguments and environment that the fake server was started with."""
        return json.loads((self.root / "calls.env").read_text())

    def processes(self) -> list[int]:
        """Live processes of this bench's server and its child."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and str(self.root).encode() in _read(entry / "environ") and _alive(entry):
                found.append(int(entry.name))
        return found


def _adapter(socket: Path) -> VllmAdapter:
    """The adapter of a server that is just starting."""
    end = time.monotonic() + SOON_S
    while True:
        try:
            return VllmAdapter(socket, Deadline(10), guard.owner(INSTANCE, SPAWN))
        except EngineError:
            assert time.monotonic() < end, "the fake server did not start"
            time.sleep(0.02)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _alive(process: Path) -> bool:
    stat = procfs.read_stat(int(process.name))
    return stat is not None and not stat.dead


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="artd-e-") as folder:
        os.chmod(folder, 0o700)
        made = Bench(Path(folder))
        yield made
        made.shm.unlink(missing_ok=True)


@pytest.fixture(scope="session")
def moe_toys() -> Iterator[Path]:
    """Folder with a toy Qwen3-MoE (`toy`; its middle layer is dense, its head tied to its embedding), checkpoints f0, f1 of
    every weight, and adapters on attention, MLP and every expert l1, l2, l3."""
    with tempfile.TemporaryDirectory(prefix="artd-r-") as name:
        folder = Path(name)
        tool(str(HERE / "make_toy.py"), str(folder / "toy"), "qwen3_moe", json.dumps(CHANGES))
        wanted = [("f", "full", 0), ("f", "full", 1), ("l", "lora", 1), ("l", "lora", 2), ("l", "lora", 3)]
        checkpoints = [f"{folder}/{kind}{step}:{mode}:{step + 1}:{step}" for kind, mode, step in wanted]
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *checkpoints)
        yield folder

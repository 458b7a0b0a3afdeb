"""vLLM as a `Kind`, on a CPU: a toy model, checkpoints scored by Hugging Face, and the trainer's side of gloo pushes.

The toy of `merged` is a dense Qwen3. The toy of `lora` is a mixture of experts whose routes are captured, with adapters on
every linear and every expert, at step 3 on experts alone.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from artd.runtimes import registry
from artd_schema.data.trajectory import RouteShape
from artd_schema.run.spec import EngineSpec, LoraSpec, Mode, RunSpec
from artd_schema.wire.worker import Push, Transfer
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Adapter
from artd_workers.engines.vllm.adapter import VllmAdapter
from artd_workers.engines.vllm.versions import VERSIONS
from tests.engine.real import HERE, serving_tool, tool

from .spawn import Flaw, rendezvous
from .vllm import SPEECH, VllmClient

STEPS = range(4)
AT = 7
"""Tensors that a trainer's side with a flaw sends before it shows."""
LEFT_OUT = "model.layers.1.mlp.up_proj.weight"


def made_as(mode: Mode, step: int) -> str:
    """How `make_checkpoint.py` makes the checkpoint of a step."""
    return "experts" if mode == "lora" and step == STEPS[-1] else mode


class Sender:
    """A tool that takes orders line by line: `ready` when it has begun with one, `sent` at its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def take(self, order: dict[str, Any]) -> None:
        """Returns when it is ready to feed the engine."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        while (line := self._process.stdout.readline().strip()) == "sent":
            continue  # of the order before
        assert line == "ready", line

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class GlooFeed(Sender):
    """`tests/engine/sender.py` in the megatron runtime's interpreter."""

    transfer: Transfer = "gloo"

    def __init__(self, folder: Path, toys: Path) -> None:
        self.rendezvous = str(rendezvous(folder))
        self._folder, self._toys = folder, toys
        super().__init__(serving_tool(str(HERE / "sender.py"), str(toys / "toy"), self.rendezvous))

    def send(self, push: Push, flaw: Flaw = "") -> None:
        flaws = {"": {}, "dies": {"die_after": AT}, "stalls": {"stall_after": AT}, "wrong": {"perturb": LEFT_OUT},
                 "short": {"leave_out": LEFT_OUT}}  # fmt: skip
        order = {
            "checkpoint": str(self._toys / f"m{push.checkpoint.step}"),
            "table": str(self._folder / "sent.json"),
        } | flaws[flaw]
        self.take(order)


class Vllm:
    """See `spawn.Kind`. The interpreters are those of the installed runtimes."""

    ways: tuple[str, ...] = ("gloo",)
    deadline_s = 12.0
    patience_s = 60.0
    tokens = 1000
    harness = "artd_workers.engines"
    versions = VERSIONS
    speech = SPEECH
    workers = True
    ahead = 1

    def __init__(self, folder: Path, mode: Mode) -> None:
        self._toys = folder
        self._prefix = mode[0]
        self.env: dict[str, str] = {}
        self.python = self.server = str(registry.find("vllm").python)
        self.routes = RouteShape(layers=2, topk=2, experts=8) if mode == "lora" else None
        family, changes = ("qwen3_moe", {"mlp_only_layers": [1]}) if mode == "lora" else ("qwen3", {})
        tool(str(HERE / "make_toy.py"), str(folder / "toy"), family, json.dumps(changes))
        wanted = [f"{self.checkpoint(step)}:{made_as(mode, step)}:{step + 1}:{step}" for step in STEPS]
        tool(str(HERE / "make_checkpoint.py"), str(folder / "toy"), *wanted)
        engine = EngineSpec(max_model_len=1024, max_num_seqs=16, kv_cache_mib=64)
        self.spec = RunSpec(
            model=str(folder / "toy"), rollout_weights_mode=mode, lora=LoraSpec(rank=4, alpha=8), engine=engine
        )

    def adapter(self, socket: Path, deadline: Deadline, owner: str) -> Adapter:
        return VllmAdapter(socket, deadline, owner)

    def client(self, socket: str) -> VllmClient:
        return VllmClient(socket)

    def checkpoint(self, step: int) -> Path:
        return self._toys / f"{self._prefix}{step}"

    def feed(self, folder: Path, way: str) -> GlooFeed:
        return GlooFeed(folder, self._toys)

"""vLLM as an engine: the parts of this folder that the harness uses."""

from __future__ import annotations

from pathlib import Path

from artd_schema.run.spec import EngineSpec
from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Capabilities
from artd_workers.engines.process.progress import Work
from artd_workers.engines.registry import Device, Engine

from . import work
from .adapter import VllmAdapter
from .command import device_of
from .server import Server
from .versions import find_installed


class Vllm:
    """The `registry.Engine` of vLLM."""

    def server(self, config: EngineConfig) -> Server:
        return Server(config)

    def adapter(self, socket: Path, deadline: Deadline) -> VllmAdapter:
        return VllmAdapter(socket, deadline)

    def read_version(self) -> Capabilities:
        return find_installed()

    def device(self, spec: EngineSpec) -> Device:
        return device_of(spec)

    def work(self, socket: Path) -> Work:
        return work.ask(socket)


ENGINE: Engine = Vllm()

"""The abacus behind a harness: versions and a command of its own; its server has vLLM's control routes, so that adapter is taken."""

from __future__ import annotations

from pathlib import Path

from artd_schema.spec import EngineSpec
from artd_schema.worker import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import Capabilities, model_name
from artd_workers.engines.process.progress import Work
from artd_workers.engines.registry import Device, Engine
from artd_workers.engines.vllm import work
from artd_workers.engines.vllm.adapter import VllmAdapter
from artd_workers.engines.vllm.server import Server
from artd_workers.engines.vllm.weights import stock_dialects

VERSIONS = (
    Capabilities("7.1", "run", weight_version=True, abort_route=True, scale_out_flag=False, keeps=True, routes="hooks"),
)
VERSION = "7.1.4"


class AbacusServer(Server):
    def command(self) -> list[str]:
        options = ["--uds", str(self.socket), "--served-model-name", model_name(self.config)]
        return [self.config.python, "-m", "abacus.serve", *options]


class AbacusAdapter(VllmAdapter):
    versions = VERSIONS

    def transfer_calls(self) -> stock_dialects.Dialect:
        return stock_dialects.dialect("0.32")


class Abacus:
    """See `registry.Engine`."""

    def server(self, config: EngineConfig) -> AbacusServer:
        return AbacusServer(config)

    def adapter(self, socket: Path, deadline: Deadline) -> AbacusAdapter:
        return AbacusAdapter(socket, deadline)

    def read_version(self) -> Capabilities:
        return VERSIONS[0]

    def device(self, spec: EngineSpec) -> Device:
        return "cpu"

    def work(self, socket: Path) -> Work:
        return work.ask(socket)


ENGINE: Engine = Abacus()

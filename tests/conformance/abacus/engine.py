"""The abacus as an engine of a harness, with versions and a command of its own. Its server has vLLM's control routes, so it
uses that adapter."""

from __future__ import annotations

import base64
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
from artd_workers.transfer.stock import await_id

VERSIONS = (
    Capabilities("7.1", weight_version=True, abort_route=True, scale_out_flag=False, routes="hooks", own_transfer=True),
)
VERSION = "7.1.4"


class AbacusServer(Server):
    def command(self) -> list[str]:
        options = ["--uds", str(self.socket), "--served-model-name", model_name(self.config)]
        return [self.config.python, "-m", "abacus.serve", *options]


class AbacusAdapter(VllmAdapter):
    versions = VERSIONS

    def _join_stock(self, rendezvous: Path, deadline: Deadline) -> None:
        unique_id = base64.b64encode(await_id(rendezvous, deadline.left)).decode()
        body = {"init_info": {"nccl_unique_id_b64": unique_id}}
        self._call("POST", "/init_weight_transfer_engine", body, deadline=deadline)


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

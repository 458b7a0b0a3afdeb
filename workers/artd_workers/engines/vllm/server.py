"""A stock vLLM OpenAI server: how it is started, asked for its health, tried, and rid of its requests."""

from __future__ import annotations

from pathlib import Path

from artd_schema.wire.worker_config import EngineConfig
from artd_workers.deadline import Deadline
from artd_workers.engines.adapter import model_name
from artd_workers.engines.http import call
from artd_workers.engines.process.server import ServerProcess

from . import guard
from .command import command, environment
from .parsers import TEMPLATE, Parsers, choose, prove
from .versions import find_installed

_PROOF_S = 60.0


class Server(ServerProcess):
    """One spawn of vLLM's server."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._parsers = Parsers()

    def command(self) -> list[str]:
        """Return the argument list of the server. Raises EngineError for a parser or flag that it has not."""
        spec = self.config.spec
        self._parsers = choose(spec.engine, Path(spec.model), find_installed().series)
        return command(self.config, self.socket, self._parsers)

    def environment(self) -> dict[str, str]:
        return environment(self.config, self.scratch)

    def files(self) -> dict[str, str]:
        template = self.config.spec.engine.chat_template
        return {TEMPLATE: template} if template else {}

    def check_health(self, deadline: Deadline) -> None:
        call(str(self.socket), "GET", "/health", deadline=deadline)

    def prove(self) -> None:
        prove(self._parsers, self.socket, model_name(self.config), Deadline(_PROOF_S))

    def end_requests(self, deadline: Deadline) -> None:
        headers = {guard.HEADER: guard.own()}
        call(str(self.socket), "POST", "/abort_requests", {}, deadline=deadline, headers=headers)

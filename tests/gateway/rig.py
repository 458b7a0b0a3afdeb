"""A gateway on a real TCP port between a fake daemon (its link) and scripted engines on Unix sockets."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import uvicorn

from artd_schema.data.trajectory import Turn
from artd_schema.wire import worker as w
from artd_workers.gateway.limits import Limits
from artd_workers.gateway.worker import Gateway
from tests.awake import SOON_S
from tests.gateway.fake_engine import FakeEngine, QuietServer

TOKEN = "sesame"
LIMITS = Limits(ready_s=0.3, hold_s=SOON_S, retry_s=0.3, label_s=0.3, ledger_s=SOON_S, call_s=SOON_S)
"""Short is what a request waits for in vain; where it is to come, a test takes a longer one."""


class Daemon:
    """The daemon as the gateway sees it: takes messages, acknowledges exchanges, sends routes and holds."""

    def __init__(self) -> None:
        self.sent: list[w.FromWorker] = []
        self.ledger: list[tuple[w.Exchange, list[Turn]]] = []
        self.acknowledge = True
        self.refusal = ""
        self.stopped: list[float] = []
        self.seq = 0
        self.gateway: Gateway

    def send(self, message: w.FromWorker, bulk: Sequence[bytes]) -> None:
        self.sent.append(message)
        if isinstance(message, w.Exchange):
            self.ledger.append((message, [msgspec.msgpack.decode(frame, type=Turn) for frame in bulk]))
            if self.acknowledge:
                self._later(w.ExchangeAck(response_id=message.response_id, error=self.refusal))

    async def say(self, message: w.ToWorker) -> None:
        await self.gateway.handle(message)

    async def route(self, *engines: w.EngineRoute, runs: tuple[str, ...] = ("pol",)) -> None:
        self.seq += 1
        await self.say(w.Route(seq=self.seq, runs=runs, engines=engines))

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]

    def _later(self, message: w.ToWorker) -> None:
        self._task = asyncio.get_running_loop().create_task(self.say(message))


class Rig:
    """Everything a test needs: the daemon, the engines, and an HTTP client with the right token."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.daemon = Daemon()
        self._stack = stack
        self._folder = folder

    async def start(self, limits: Limits = LIMITS, spawn: int = 0) -> None:
        self.gateway = Gateway(self.daemon.send, limits, TOKEN, self.daemon.stopped.append, spawn)
        self.daemon.gateway = self.gateway
        config = uvicorn.Config(self.gateway.app, host="127.0.0.1", port=0, log_level="critical", lifespan="off")
        self.server = await self._stack.enter_async_context(QuietServer(config).running())
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = await self._stack.enter_async_context(self.client())

    @property
    def bearer(self) -> str:
        return f"Bearer {TOKEN}"

    def client(self, token: str = TOKEN) -> httpx.AsyncClient:
        headers = {"authorization": f"Bearer {token}".encode()}
        return httpx.AsyncClient(base_url=self.url, headers=headers, trust_env=False, timeout=2 * SOON_S)

    async def engine(self, name: str = "e0", make: type[FakeEngine] = FakeEngine, **options: Any) -> FakeEngine:
        engine = make(str(self._folder / name), **options)
        await self._stack.enter_async_context(engine.server.running())
        return engine

    async def limits(self, **changes: Any) -> None:
        """Start over with other limits."""
        await self.start(replace(LIMITS, **changes))

    async def chat(self, **body: Any) -> httpx.Response:
        headers = body.pop("headers", {})
        asked = {"model": "pol", "messages": [{"role": "user", "content": "Capital?"}]} | body
        return await self.http.post("/v1/chat/completions", json=asked, headers=headers)

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "pol", "prompt": "Capital?"} | body)


def served(step: int, epoch: int, run: str = "pol") -> w.Served:
    return w.Served(name=f"{run}@{step}", run=run, step=step, epoch=epoch)


def merged(engine: FakeEngine, step: int, epoch: int, *, name: str = "e0", hold: bool = False) -> w.EngineRoute:
    return w.EngineRoute(engine=name, socket=engine.socket, mode="merged", base_model=engine.base_model,
                         max_model_len=engine.max_model_len, served=(served(step, epoch),), hold=hold,
                         routes=engine.routes, kind=engine.kind)  # fmt: skip


def lora(engine: FakeEngine, *steps: tuple[int, int], name: str = "e0") -> w.EngineRoute:
    engine.models |= {f"pol@{step}" for step, _ in steps}
    return w.EngineRoute(engine=name, socket=engine.socket, mode="lora", base_model=engine.base_model,
                         max_model_len=engine.max_model_len, served=tuple(served(*s) for s in steps),
                         routes=engine.routes, kind=engine.kind)  # fmt: skip


def ints(column: bytes) -> list[int]:
    return list(struct.unpack(f"<{len(column) // 4}i", column))


def floats(column: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(column) // 4}f", column))


def text_of(column: bytes) -> str:
    return "".join(map(chr, ints(column)))

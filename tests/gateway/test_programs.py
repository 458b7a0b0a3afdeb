"""Agent frameworks, unmodified, in one environment of their own, before a scripted engine that calls the first tool once and then says 4."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.fake_engine import FakeEngine, Json
from tests.gateway.rig import TOKEN, Rig, merged

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAMS = Path(__file__).parent / "programs"
PACKAGES = ("openai", "openai-agents", "langchain", "langchain-openai", "pydantic-ai-slim[openai]", "anthropic")
INSTALL_S, RUN_S = 400.0, 120.0
EXPECTED = {
    "agents_program": [f"{api} {line}" for api in ("chat_completions", "responses") for line in ("tool 4", "stream True 4", "typed 4", "sub 4")],
    "langchain_program": ["tool ['HumanMessage', 'AIMessage', 'ToolMessage', 'AIMessage'] 4", "stream 4", "agent stream True", "typed 4", "forced 2+2"],
    "pydantic_program": ["plain 4", "tool 4", "stream 4", "forced 2+2", "typed 4"] * 2,
    "anthropic_program": ["tool tool_use {'expr': '2+2'}", "answer 4", "stream message_stop {'expr': '2+2'}", "count True", "runner 4"],
}  # fmt: skip


class Caller(FakeEngine):
    """Calls the first tool while no tool has answered; fills a schema; else says 4."""

    def script(self, asked: Json) -> None:
        tools, messages = asked.get("tools") or (), asked.get("messages") or [{"role": ""}]
        self.texts, self.tool_calls, self.deltas = ["4$"], [], []
        if (asked.get("response_format") or {}).get("type") == "json_schema":
            self.texts = ['{"answer":"4"}$']
        elif tools and messages[-1]["role"] != "tool":
            function = tools[0]["function"]
            given = json.dumps(dict.fromkeys(function["parameters"].get("properties", {}), "2+2"))
            self.texts = ["xyz$"]
            head = {"id": "x", "type": "function", "function": {"name": function["name"], "arguments": ""}}
            self.tool_calls = [head | {"function": {"name": function["name"], "arguments": given}}]
            self.deltas = [
                {"tool_calls": [{"index": 0} | head]},
                {"tool_calls": [{"index": 0, "function": {"arguments": given}}]},
            ]

    async def _render_chat(self, request: Any, body: Json) -> Any:
        self.script(body)
        return await super()._render_chat(request, body)

    async def _derender_chat(self, request: Any, body: Json) -> Any:
        self.script(body["chat_request"])
        told = await super()._derender_chat(request, body)
        for choice in told["choices"] if self.tool_calls else ():
            choice["message"]["content"] = None
        return told

    async def _events(self, body: Json) -> AsyncIterator[Json]:
        self.script(body.get("chat") or {})
        async for event in super()._events(body):
            yield event


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """The interpreter of an environment with the packages' newest versions."""
    import subprocess

    with tempfile.TemporaryDirectory(prefix="artd-p-") as name:
        subprocess.run([sys.executable, "-m", "venv", name], check=True, timeout=INSTALL_S)
        install = [f"{name}/bin/pip", "install", "-q", "--disable-pip-version-check", *PACKAGES]
        subprocess.run(install, check=True, timeout=INSTALL_S, stderr=subprocess.DEVNULL)
        yield Path(name) / "bin" / "python"


@pytest.mark.asyncio
@pytest.mark.parametrize("program", EXPECTED)
async def test_a_program_runs_unmodified(rig: Rig, python: Path, program: str) -> None:
    engine = await rig.engine(make=Caller, max_model_len=20_000)
    await rig.daemon.route(merged(engine, 3, 4))
    env = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    running = await asyncio.create_subprocess_exec(
        python, PROGRAMS / f"{program}.py", env=env | {"BASE": rig.url, "KEY": TOKEN, "PYTHONWARNINGS": "ignore"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(RUN_S):
        said, errors = await running.communicate()
    assert said.decode().splitlines() == EXPECTED[program], errors.decode()[-3000:]
    assert rig.daemon.ledger and all(exchange.split == "train" for exchange, _ in rig.daemon.ledger)

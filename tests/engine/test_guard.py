"""The guard before vLLM's own control routes, as ASGI: who is let in, and what passes untouched."""

from __future__ import annotations

import json
from typing import Any

import pytest

from artd_workers.engines.vllm import guard

pytestmark = pytest.mark.asyncio
Sent = list[dict[str, Any]]


async def asked(scope: dict[str, Any]) -> tuple[bool, Sent]:
    """Whether the server behind the guard saw the call, with what it was called with; and what was sent."""
    seen: list[tuple[Any, ...]] = []
    sent: Sent = []

    async def app(*arguments: Any) -> None:
        seen.append(arguments)

    async def receive() -> dict[str, Any]:
        raise AssertionError("the guard reads no body")

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await guard.Guard(app)(scope, receive, send)
    assert seen in ([], [(scope, receive, send)])
    return bool(seen), sent


def http(path: str, *told: str) -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": [(guard.HEADER.encode(), value.encode()) for value in told]}


@pytest.fixture(autouse=True)
def spawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARTD_INSTANCE", "i")
    monkeypatch.setenv("ARTD_SPAWN", "7")


@pytest.mark.parametrize("route", sorted(guard.ROUTES))
async def test_only_the_own_harness_controls_the_server(route: str) -> None:
    assert await asked(http(route, guard.owner("i", 7))) == (True, [])
    for told in ([], [""], [guard.owner("i", 6)], [guard.owner("j", 7)], ["i/7 "]):
        seen, sent = await asked(http(route, *told))
        assert not seen
        assert (sent[0]["status"], sent[1]["type"]) == (guard.CONFLICT, "http.response.body")
        assert "belongs to instance and spawn i/7" in json.loads(sent[1]["body"])["error"]["message"]


@pytest.mark.parametrize(
    "scope",
    [http("/v1/completions"), http("/collective_rpc"), http("/health"), http("/pause/"), {"type": "lifespan"},
     {"type": "websocket", "path": "/pause", "headers": []}],
    ids=lambda scope: scope.get("path", "lifespan"),
)  # fmt: skip
async def test_everything_else_passes_untouched(scope: dict[str, Any]) -> None:
    assert await asked(scope) == (True, [])

"""An engine that serves no model: speaks the protocol through the real link, and says Live to every push.

Run by a stand-in for the vllm runtime's interpreter. Faults (see script.py): `dead:N` spawns that report Down at their
start, `bad:STEP` fences whose push fails its canary, `crash:STEP` fences at which it kills itself. Gate: `push:STEP`.
With `http` in the script it also serves the OpenAI fake of tests/gateway on its socket, which captures routed experts
when the daemon wants them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from artd_schema import worker as w
from artd_schema.trajectory import RouteShape
from artd_workers.harness import Link, LinkClosed
from tests.fakes.script import Script


def main() -> int:
    script = Script.from_env()
    link = Link.from_env("engine", {"fake": "1"})
    welcome = link.start()
    config = welcome.engine
    assert config is not None
    if script.wants("dead", link.identity.spawn):
        link.send(w.Down(error="the engine could not start", tail="CUDA error: no such device\nlast words"))
        link.close()
        return 1
    socket = Path(config.dir) / "engine.sock"
    served = Served(config.run, config.routes)
    if "http" in script.read():
        served.start(socket)
    link.send(w.Ready(socket=str(socket)))
    highest = 0
    try:
        while True:
            received = link.receive(1.0)
            message = received[0] if received else None
            if isinstance(message, w.Push):
                assert message.fence > highest, f"fence {message.fence} after {highest}"
                highest = message.fence
                served.names.add(message.name)
                if not push(link, script, message):
                    return 1
            elif isinstance(message, w.Exit):
                link.close()
                return 0
    except LinkClosed:
        return 0


def push(link: Link, script: Script, message: w.Push) -> bool:
    """Whether the engine is still good afterwards."""
    step = message.checkpoint.step
    assert (Path(message.checkpoint.dir) / "manifest.json").is_file(), "the checkpoint is not there"
    script.gate(f"push:{step}", message.fence)
    if script.wants(f"crash:{step}", message.fence):
        os.kill(os.getpid(), signal.SIGKILL)
    if script.wants(f"bad:{step}", message.fence):
        link.send(w.PushFailed(push=message.push, fence=message.fence, phase="verify", error="told to fail"))
        link.close()
        return False
    link.send(w.Live(push=message.push, fence=message.fence, max_abs=1e-6, mean_abs=1e-7, seconds={"load": 0.01}))
    return True


class Served:
    """The names that the OpenAI fake knows: the base model, and each step from its push on."""

    def __init__(self, run: str, routes: RouteShape | None) -> None:
        self.names = {f"{run}@base"}
        self.routes = routes

    def start(self, socket: Path) -> None:
        """Serve in a thread of its own, until the process ends."""
        threading.Thread(target=lambda: asyncio.run(self._serve(str(socket))), daemon=True).start()

    async def _serve(self, socket: str) -> None:
        from tests.gateway.fake_engine import FakeEngine

        engine = FakeEngine(socket)
        engine.models = self.names
        engine.routes = self.routes
        await engine.server.serve()


if __name__ == "__main__":
    sys.exit(main())

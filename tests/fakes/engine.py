"""An engine that serves no model: it speaks the protocol through the real link, and says Live to every push.

A stand-in for the vllm runtime's interpreter runs it. Faults (see script.py): `dead:N` spawns that report Down at their start,
`bad:STEP` and `bad:ENGINE` fences whose push fails its canary, `crash:STEP` fences at which it kills itself. Gates: `push:STEP` before it asks
the gateway to hold, `verify:STEP` once the gateway holds. Mark: `live:SHA FENCE` before it says Live. With `http` in the script
it also serves the OpenAI fake of tests/gateway on its socket, which captures routed experts when the daemon wants them. With
`sign` it also reports only which weights it holds, with `names` only its own name.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from pathlib import Path

from artd_schema.crashpoint import reach
from artd_schema.data.trajectory import RouteShape
from artd_schema.wire import worker as w
from artd_workers.daemon_link import Link, LinkClosed
from tests.fakes.script import Script

SIGNED = 32  # characters of a sha256: one token each


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
    served = Served(config.run, config.routes, script, link.identity.name)
    if "http" in script.read():
        served.start(socket)
    reach("engine.started")
    link.send(w.Ready(socket=str(socket)))
    highest = 0
    try:
        while True:
            received = link.receive(1.0)
            message = received[0] if received else None
            if isinstance(message, w.Push):
                assert message.fence > highest, f"fence {message.fence} after {highest}"
                highest = message.fence
                if not push(link, script, message, served):
                    return 1
            elif isinstance(message, w.Exit):
                link.close()
                return 0
    except LinkClosed:
        return 0


def push(link: Link, script: Script, message: w.Push, served: Served) -> bool:
    """Whether the engine is still good afterwards."""
    step = message.checkpoint.step
    reach("engine.fenced")
    assert (Path(message.checkpoint.dir) / "manifest.json").is_file(), "the checkpoint is not there"
    script.gate(f"push:{step}", message.fence)
    if message.mode == "merged" and not held(link, message):
        return False
    if script.wants(f"crash:{step}", message.fence):
        os.kill(os.getpid(), signal.SIGKILL)
    if script.wants(f"bad:{step}", message.fence) or script.wants(f"bad:{message.engine}", message.fence):
        link.send(w.PushFailed(push=message.push, fence=message.fence, phase="verify", error="told to fail"))
        link.close()
        return False
    served.update(message)
    script.gate(f"verify:{step}", message.fence)
    reach("engine.verified")
    script.mark(f"live:{message.checkpoint.sha}", message.fence)
    link.send(w.Live(push=message.push, fence=message.fence, max_abs=1e-6, mean_abs=1e-7, seconds={"load": 0.01}))
    return True


def held(link: Link, push: w.Push) -> bool:
    """Ask for the hold and wait for it; False when told to exit instead."""
    link.send(w.Pausing(push=push.push, fence=push.fence))
    reach("engine.pausing")
    while True:
        received = link.receive(1.0)
        match received[0] if received else None:
            case w.Proceed() as answer:
                assert (answer.push, answer.fence) == (push.push, push.fence), answer
                return True
            case w.Exit():
                link.close()
                return False


class Served:
    """The names that the OpenAI fake knows, the base model's and each step's from its push on, and which weights (sha of a
    checkpoint's manifest) each of them is. In merged mode all names are the same weights, the version that is told with the
    tokens is the newest push's, and nothing is generated between pause and resume."""

    def __init__(self, run: str, routes: RouteShape | None, script: Script, name: str = "") -> None:
        self.run = run
        self.name = name
        self.names = {run, f"{run}@base"}
        self.weights = dict.fromkeys(self.names, "(nothing was pushed)")
        self.version = "default"
        self.routes = routes
        self.script = script
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listening = threading.Event()

    def update(self, push: w.Push) -> None:
        """Take the weights, past the crash points of a real push."""
        if push.mode == "lora":
            self._take(push.name, push.checkpoint.sha)
            reach("engine.updated")
            return
        self._gate("clear")
        reach("engine.paused")
        self._take(self.run, push.checkpoint.sha)
        self.version = push.name
        reach("engine.updated")
        self._gate("set")
        reach("engine.resumed")

    def _take(self, name: str, sha: str) -> None:
        self.weights[name] = sha
        self.names.add(name)

    # ---- the server, in a thread of its own -----------------------------------------------------------------------------

    def start(self, socket: Path) -> None:
        """Serve until the process ends; returns when it listens."""
        threading.Thread(target=lambda: asyncio.run(self._serve(str(socket))), daemon=True).start()
        self._listening.wait()

    async def _serve(self, socket: str) -> None:
        from tests.gateway.fake_engine import FakeEngine

        self._engine = engine = FakeEngine(socket)
        engine.models = self.names
        engine.routes = self.routes
        if "sign" in self.script.read():
            engine.says = lambda model: (f"{self.weights[model][:SIGNED]}$", self.version)
        if "names" in self.script.read():
            engine.says = lambda model: (f"{self.name}$", self.version)
        async with engine.server.running():
            self._loop = asyncio.get_running_loop()
            self._listening.set()
            await asyncio.Event().wait()

    def _gate(self, change: str) -> None:
        """`set` or `clear` what requests wait for; done when this returns."""
        if self._loop is not None:
            done = threading.Event()
            self._loop.call_soon_threadsafe(lambda: (getattr(self._engine.gate, change)(), done.set()))
            done.wait()


if __name__ == "__main__":
    sys.exit(main())

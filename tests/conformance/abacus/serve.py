"""The abacus's server, without beads: `scripted` in the words of `engine.py`. Run as `FAKE -m abacus.serve --uds PATH ...`."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[3]))
from artd_workers.engines.adapter import EngineError, Fence
from artd_workers.engines.gate import FenceError
from tests.conformance.abacus.engine import OWNER, VERSION, owner_of
from tests.engine import scripted
from tests.engine.folders import seed_of_adapter
from tests.engine.scripted import GATE, LOCK, SCRIPT, STATE, Speaker, Unfit, Wire

QUIET = ("upright", "moving")
OWNED = ("halt", "go", "drop", "meet", "slide", "name", "sweep", "hang", "unhang")
MODES = {"finish": "wait", "drop": "abort", "freeze": "keep"}
DIRECT = ("table", "open", "expect", "room", "stage", "staged", "pull", "swap")


class Handler(Speaker):
    def serve(self, body: dict[str, Any]) -> None:
        verb = urlsplit(self.path).path.removeprefix("/abacus/")
        if verb not in QUIET:
            with LOCK, open(SCRIPT["calls"], "a") as calls:
                calls.write(json.dumps({"route": verb, "body": body}) + "\n")
        if scripted.dead() and verb == "upright":
            return self.reply(503, "")
        if scripted.dead() and verb not in ("moving", "about"):
            time.sleep(600)
        if verb in OWNED and self.headers.get(OWNER) != owner_of():
            return self.reply(403, {"error": {"message": f"{verb}: this abacus belongs to {owner_of()}"}})
        try:
            done = answer(verb, body)
        except (FenceError, Unfit, EngineError) as error:
            return self.reply(500, {"error": {"message": str(error)}})
        if done is None:
            return self.reply(404, {"error": {"message": f"{verb}: there is nothing of that name"}})
        return self.reply(200, {"done": done})


def answer(verb: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """What was done; None for a name that there is not. Raises FenceError, Unfit, EngineError."""
    match verb:
        case "about":
            return {"release": SCRIPT.get("version", VERSION)}
        case "halt":
            scripted.pause(MODES[body["how"]], body["forget"])
        case "go":
            scripted.resume()
        case "still":
            return {"still": STATE.paused}
        case "drop":
            scripted.abort()
        case "frame":
            GATE.begin(Fence(**body["fence"]))
        case "meet":
            GATE.require_open()
            STATE.wire = Wire(body["place"])
        case "slide":
            GATE.check(Fence(**body["fence"]))
            scripted.load(body["rods"], STATE.wire.read(body["rods"], body["seconds"]))
        case "string":
            GATE.check(Fence(**body["fence"]))
            scripted.load_from_disk(body["rods"], body["folder"])
        case "seal":
            GATE.check(Fence(**body["fence"]))
            GATE.finish()
            return scripted.finish()
        case "name":
            assert STATE.paused
            STATE.label = body["name"]
        case "called":
            return {"name": STATE.label}
        case "sweep":
            return {} if scripted.sweep() else {"held": len(STATE.running)}
        case "hang":
            STATE.adapters[body["name"]] = seed_of_adapter(Path(body["folder"]))
        case "unhang":
            return None if STATE.adapters.pop(body["name"], None) is None else {}
        case "compare":
            scripted.check_adapter(body["folder"], body["rods"])
            return {"tensors": len(body["rods"]), "bytes": 64}
        case "count":
            if (found := scripted.complete(body["model"], body["prompts"], body["tokens"])) is None:
                return None
            return {"why": found[0], "beads": found[1]}
        case "moving":
            return {"names": list(STATE.running.values()), "moved": STATE.tokens, "found": STATE.hits}
        case "watch":
            scripted.require_shape(body["shape"])
        case "warm":
            return dict(SCRIPT.get("warm", scripted.WARM))
        case _ if verb in DIRECT:
            return scripted.direct(verb, body)
    return {}


if __name__ == "__main__":
    scripted.main(Handler)

"""The abacus's wire, as the suite sees it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artd_workers.deadline import Deadline
from tests.conformance.speech import Speech

from .engine import ask


def _calls(*verbs: str) -> tuple[str, ...]:
    return tuple(f"/abacus/{verb}" for verb in verbs)


SPEECH = Speech(
    methods={
        name: _calls(*verbs.split())
        for name, verbs in {
            "pause": "halt", "resume": "go", "begin": "frame", "join": "meet", "receive": "slide seal",
            "load_merged": "string seal", "finish": "name sweep", "load_adapter": "hang", "check_adapter": "compare",
            "unload_adapter": "unhang", "in_flight": "moving", "score": "count", "warm": "warm", "capture_routes": "watch",
            "abort_all": "drop", "direct_table": "table", "direct_open": "open", "direct_expect": "expect",
            "direct_room": "room", "direct_stage": "stage staged", "direct_pull": "pull", "direct_swap": "swap",
        }.items()
    },
    pushes={
        way: {phase: _calls(*verbs.split()) for phase, verbs in phases.items()}
        for way, phases in {
            "disk": {
                "pause": "halt", "transfer": "frame seal string", "load": "name sweep", "resume": "go", "verify": "count",
            },
            "gloo": {"transfer": "frame meet seal slide"},
            "stock": {"transfer": "frame meet seal slide"},
            "in_place": {"open": "expect open", "transfer": "pull"},
            "staged": {"open": "open expect", "stage": "staged stage", "transfer": "swap"},
            "lora": {"load": "hang", "verify": "compare count"},
        }.items()
    },
    texts=(),
    version="/abacus/about",
    health="/abacus/upright",
    quiet=_calls("upright", "moving"),
    optional={},
    score="beads",
    fine={"done": {}},
    held={"done": {"held": 1}},
    release=lambda version: {"done": {"release": version}},
    stranger=({"version": "7.1.4"}, "no abacus"),
)  # fmt: skip


class AbacusClient:
    """See `tests.conformance.speech.Client`."""

    def __init__(self, socket: str) -> None:
        self._socket = socket

    def _ask(self, verb: str, owner: str = "", **body: Any) -> dict[str, Any]:
        return ask(self._socket, verb, body, deadline=Deadline(60.0), owner=owner)

    def complete(self, model: str, tokens: int, prompt: Sequence[int]) -> str:
        return str(self._ask("count", model=model, prompts=[list(prompt)], tokens=tokens)["why"])

    def scores(self, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        found: list[list[float]] = self._ask("count", model=model, prompts=[list(p) for p in prompts], tokens=1)[
            "beads"
        ]
        return found

    def running(self) -> float:
        return float(len(self._ask("moving")["names"]))

    def paused(self) -> bool:
        return bool(self._ask("still")["still"])

    def prefix_hits(self) -> float:
        return float(self._ask("moving")["found"])

    def label(self) -> str:
        return str(self._ask("called")["name"])

    def relabel(self, owner: str) -> None:
        self._ask("name", owner, name="another")

    def generate(self, model: str, request: str, tokens: int, **sampling: Any) -> list[dict[str, Any]]:
        raise NotImplementedError("nothing is sampled on an abacus")

    def sampled(self, *choices: str) -> dict[str, Any]:
        raise NotImplementedError("nothing is sampled on an abacus")

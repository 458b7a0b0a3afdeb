"""Says which process can be hit in which phase of the loop, and at which crash points a phase is recognised.

Every crash point that a running loop reaches belongs to one phase. A cell is a (process, phase) pair; cells that cannot exist
(a packer while there is no packer) are left out.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal, NamedTuple

from artd_schema.crashpoint import RECOVERY

Action = Literal["kill", "pause"]

PHASES: dict[str, tuple[str, ...]] = {
    "ingest": (
        "submit.inserted", "submit.committed", "exchange.committed", "delivery.committed", "refer.committed",
        "gateway.generated", "gateway.recorded", "gateway.ended", "client.sent",
        "file.written", "file.renamed", "writer.commit", "writer.committed",
    ),
    "pack": ("pack.requested", "pack.written", "pack.adopted", "pack.committed"),
    "claim": ("job.claimed", "train.accepted"),
    "train": ("train.stepped",),
    "stage": ("stage.files", "stage.manifest"),
    "commit": ("result.verified", "publish.renamed", "result.published", "result.committed", "train.committed"),
    "push": (
        "push.claimed", "engine.fenced", "engine.pausing", "gateway.held", "push.held", "engine.paused", "engine.updated",
        "engine.resumed", "engine.verified", "push.live", "push.served",
    ),
    "recover": (*RECOVERY, "spawn.started", "engine.started"),
    "idle": (),
}  # fmt: skip
PROCESSES = ("daemon", "trainer", "engine", "gateway", "client", "packer")
FREQUENT = 8  # a point of ingest is taken at one of so many arrivals
KILLS, PAUSES = 5, 2  # of each cell, at least


class Cell(NamedTuple):
    process: str
    phase: str


def cells() -> list[Cell]:
    """All that exist."""
    found = [Cell(process, phase) for process in PROCESSES if process != "packer" for phase in PHASES]
    return [*found, Cell("packer", "pack")]


def triggers(cell: Cell) -> tuple[str, ...]:
    """Points at which a cell's process is there to be hit."""
    if cell.process == "packer":
        return ("pack.written",)
    if cell.phase == "recover":
        return PHASES["recover"][:-1] if cell.process in ("daemon", "client") else ("engine.started",)
    return PHASES[cell.phase]


class Draw:
    """Draws cells, the short ones first. done: what was hit so far, in this run and in those before it."""

    def __init__(
        self, rng: random.Random, done: Counter[tuple[Cell, Action]], costs: dict[str, float] | None = None
    ) -> None:
        self._rng = rng
        self._costs = costs or {}
        self.done = done
        self.missed: Counter[Cell] = Counter()

    def draw(self, recovering: bool) -> tuple[Cell, Action]:
        """recovering: the daemon is about to start again; only then can its recovery be hit."""
        choices = [
            (cell, action)
            for cell in cells()
            if (cell.phase == "recover") == recovering
            for action in ("kill", "pause")
        ]
        return self._rng.choices(choices, [self._weight(cell, action) for cell, action in choices])[0]

    def _weight(self, cell: Cell, action: str) -> float:
        goal = KILLS if action == "kill" else PAUSES
        filled = self.done[cell, action] / goal  # type: ignore[index]
        return goal / ((0.2 + filled) ** 2 * (1 + self.missed[cell]) * self._costs.get(cell.process, 1.0))

    def point(self, cell: Cell) -> tuple[str, int]:
        """(crash point, arrival) at which the cell is hit."""
        return self._rng.choice(triggers(cell)), self._rng.randint(1, FREQUENT if cell.phase == "ingest" else 1)

    def pause_s(self, lease_s: float) -> float:
        """Shorter or longer than the lease."""
        return (
            self._rng.uniform(0.05, 0.6) * lease_s
            if self._rng.random() < 0.5
            else self._rng.uniform(1.15, 1.7) * lease_s
        )

"""Chooses how a live push travels, from what trainer and engine offer and what has failed since.

Owns what the present processes can do; none of it outlives them. A transfer that one side does not offer, or that this
trainer has refused for this engine, is not chosen. If none is left, the push comes from disk.
"""

from __future__ import annotations

from artd_schema.wire import worker as w

Process = tuple[str, int]
"""(name, spawn) of a worker's process."""


class Transfers:
    """The possible transfers of every pair of a trainer and an engine."""

    def __init__(self) -> None:
        self._able: dict[str, tuple[int, tuple[w.Transfer, ...]]] = {}
        self._refused: set[tuple[Process, str, w.Transfer]] = set()

    def able(self, name: str, spawn: int, ways: tuple[w.Transfer, ...]) -> None:
        """Note the transfers that a worker's process offers, best first."""
        self._able[name] = (spawn, ways)

    def rule_out(self, trainer: Process, engine: str, way: w.Transfer) -> None:
        """Note that this process of the trainer cannot use that transfer to this engine. The next push uses another
        one."""
        self._refused.add((trainer, engine, way))
        if way == "direct":
            self._refused.add((trainer, engine, "nccl"))  # nccl needs the same plan, which failed

    def forget(self, trainer: str) -> None:
        """Forget what the trainer's earlier processes refused: they are gone."""
        self._refused = {refusal for refusal in self._refused if refusal[0][0] != trainer}

    def choose(self, trainer: Process, engine: Process) -> w.Transfer | None:
        """Return the engine's best transfer that the trainer can use, too, or None if there is none."""
        offered = {way for way in self._of(*trainer) if (trainer, engine[0], way) not in self._refused}
        return next((way for way in self._of(*engine) if way in offered), None)

    def _of(self, name: str, spawn: int) -> tuple[w.Transfer, ...]:
        known, ways = self._able.get(name, (spawn, ("gloo",)))
        return ways if known == spawn else ("gloo",)

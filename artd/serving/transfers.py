"""How a live push may travel: what trainer and engine said that they can, and what has failed since.

Owner of: what the present processes can do; nothing of it outlives them. Invariants: a way that one side does not name, or that
a trainer refused once, is not taken; where none is left, a push comes from disk.
"""

from __future__ import annotations

from artd_schema.wire import worker as w

Process = tuple[str, int]
"""(name, spawn) of a worker's process."""


class Transfers:
    """The ways of every pair of a trainer and an engine."""

    def __init__(self) -> None:
        self._able: dict[str, tuple[int, tuple[w.Transfer, ...]]] = {}
        self._refused: set[tuple[Process, str, w.Transfer]] = set()

    def able(self, name: str, spawn: int, ways: tuple[w.Transfer, ...]) -> None:
        """A worker is ready. ways: best first."""
        self._able[name] = (spawn, ways)

    def refused(self, trainer: Process, engine: str, way: w.Transfer) -> None:
        """Note that this process of the trainer cannot send that way to this engine: the next push goes another one."""
        self._refused.add((trainer, engine, way))
        if way == "direct":
            self._refused.add((trainer, engine, "nccl"))  # it is the same plan that cannot be made

    def forget(self, trainer: str) -> None:
        """Forget what the trainer's processes so far refused: they are gone."""
        self._refused = {refusal for refusal in self._refused if refusal[0][0] != trainer}

    def choose(self, trainer: Process, engine: Process) -> w.Transfer | None:
        """Return the engine's best way that the trainer can go too, None when there is none."""
        offered = {way for way in self._of(*trainer) if (trainer, engine[0], way) not in self._refused}
        return next((way for way in self._of(*engine) if way in offered), None)

    def _of(self, name: str, spawn: int) -> tuple[w.Transfer, ...]:
        known, ways = self._able.get(name, (spawn, ("gloo",)))
        return ways if known == spawn else ("gloo",)

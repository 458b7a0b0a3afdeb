"""How a live push may travel: what trainer and engine said that they can, and what has failed since.

Owner of: what the present processes can do; nothing of it outlives them. Invariants: a way that one side does not name, or that
a trainer refused once, is not taken; where none is left, a push comes from disk.
"""

from __future__ import annotations

from artd_schema import worker as w


class Transfers:
    """One trainer and one engine, by the names of their workers."""

    def __init__(self) -> None:
        self._able: dict[str, tuple[int, tuple[w.Transfer, ...]]] = {}
        self._refused: set[tuple[int, w.Transfer]] = set()

    def able(self, name: str, spawn: int, ways: tuple[w.Transfer, ...]) -> None:
        """A worker is ready. ways: best first."""
        self._able[name] = (spawn, ways)

    def refused(self, trainer: int, way: w.Transfer) -> None:
        """This spawn of the trainer cannot send that way to this engine: the next push goes another one."""
        self._refused.add((trainer, way))
        if way == "direct":
            self._refused.add((trainer, "nccl"))  # it is the same plan that cannot be made

    def choose(self, trainer: tuple[str, int], engine: tuple[str, int]) -> w.Transfer | None:
        """The engine's best way that the trainer can go too; (name, spawn) of each."""
        offered = set(self._of(*trainer)) - {way for spawn, way in self._refused if spawn == trainer[1]}
        return next((way for way in self._of(*engine) if way in offered), None)

    def _of(self, name: str, spawn: int) -> tuple[w.Transfer, ...]:
        known, ways = self._able.get(name, (spawn, ("gloo",)))
        return ways if known == spawn else ("gloo",)

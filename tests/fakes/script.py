"""The script of fake workers: a JSON file ($ARTD_FAKE_SCRIPT) that says what they do wrong, and that a test may rewrite at any
time.

It is read anew at each question, so that a test steers a running worker. Marks are files beside it; a mark is written before
the worker waits at its gate.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "ARTD_FAKE_SCRIPT"


class Script:
    """Keys are `point`s such as `train:1` (step 1); values are lists of fences (or spawns), [] = all, or a number."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def from_env(cls) -> Script:
        return cls(Path(os.environ[VARIABLE]))

    def read(self) -> dict[str, Any]:
        return dict(json.loads(self.path.read_text())) if self.path.exists() else {}

    def write(self, **faults: Any) -> None:
        """Replace the whole script; `__` in a name stands for `:`."""
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(json.dumps({name.replace("__", ":"): value for name, value in faults.items()}))
        temporary.replace(self.path)

    def wants(self, point: str, number: int) -> bool:
        """Whether the fault of this name shall happen at this fence."""
        fences = self.read().get(point)
        return fences is not None and (not fences or number in fences)

    def number(self, name: str, default: float = 0.0) -> float:
        return float(self.read().get(name, default))

    def gate(self, point: str, number: int) -> None:
        """Mark that the point was reached; wait here while the script says `hold:POINT`."""
        self.mark(point, number)
        while self.wants(f"hold:{point}", number):
            time.sleep(0.01)

    def mark(self, point: str, number: int) -> None:
        with self.path.with_suffix(".marks").open("a") as file:
            file.write(f"{point} {number}\n")

    def marks(self) -> list[str]:
        """Every mark so far, oldest first, such as `train:1 2`: job of step 1 under fence 2."""
        marks = self.path.with_suffix(".marks")
        return marks.read_text().splitlines() if marks.exists() else []

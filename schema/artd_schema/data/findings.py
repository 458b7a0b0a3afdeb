"""What a rule of the rule book (`rules`, `route_rules`) finds wrong."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """A broken rule. `where` is a path such as `turns[1].logprobs[3]`; `what` says what is wrong there."""

    where: str
    what: str

    def under(self, path: str) -> Finding:
        """Return the same finding, where `path` is what its path begins at."""
        return Finding(f"{path}.{self.where}", self.what)

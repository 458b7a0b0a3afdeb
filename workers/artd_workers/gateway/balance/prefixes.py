"""Prefixes of token sequences, in blocks, and which caches hold them.

`Holders` follows what engines cache from the requests that they got. It is an estimate: an engine may have evicted a prefix, and a wrong
guess costs one prefill. It owns the blocks of the newest requests, `LIMIT` of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

BLOCK = 128
"""Tokens. Smaller blocks find shorter prefixes, and cost more time for each request."""
LIMIT = 1 << 17
"""Blocks that are remembered: 8 million tokens, some 30 MB."""

Cache = tuple[str, int]
"""(socket of an engine's process, policy epoch). No prefix outlives either."""


class Prefix(NamedTuple):
    """A token sequence. `hashes[i]` stands for its first (i + 1) * BLOCK tokens, `rest` are the tokens after the last whole block."""

    hashes: tuple[int, ...] = ()
    rest: tuple[int, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.hashes) * BLOCK + len(self.rest)

    def extend(self, tokens: Sequence[int]) -> Prefix:
        """Return the sequence with `tokens` after it."""
        after = (*self.rest, *tokens) if self.rest else tuple(tokens)
        last = self.hashes[-1] if self.hashes else 0
        whole = len(after) - len(after) % BLOCK
        added = []
        for at in range(0, whole, BLOCK):
            last = hash((last, after[at : at + BLOCK]))
            added.append(last)
        return Prefix((*self.hashes, *added), after[whole:])


class Holders:
    """The caches that hold each block. A block stands for all tokens before it, too."""

    def __init__(self, limit: int = LIMIT) -> None:
        self._limit = limit
        self._caches: OrderedDict[int, tuple[Cache, ...]] = OrderedDict()

    def find(self, prefix: Prefix, caches: Collection[Cache]) -> dict[Cache, int]:
        """Return how many tokens of the prefix each of these caches holds, without those that hold none."""
        found: dict[Cache, int] = {}
        for index in range(len(prefix.hashes) - 1, -1, -1):
            for cache in self._caches.get(prefix.hashes[index], ()):
                if cache in caches:
                    found.setdefault(cache, (index + 1) * BLOCK)
            if len(found) == len(caches):
                break
        return found

    def add(self, prefix: Prefix, cache: Cache, known_blocks: int = 0) -> None:
        """Note that a cache holds the whole blocks of a sequence from now on. It is known to hold the first `known_blocks`."""
        for block in prefix.hashes[known_blocks:]:
            known = self._caches.pop(block, ())
            self._caches[block] = known if cache in known else (*known, cache)
        while len(self._caches) > self._limit:
            self._caches.popitem(last=False)

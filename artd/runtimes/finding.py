"""The result of one check of `artd doctor`. Every finding that is not `ok` says what to do next."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    name: str
    state: str  # ok | warning | missing
    value: str
    next: str = ""

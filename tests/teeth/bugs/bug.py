"""A bug that somebody could make, with a test that must not let it pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Bug:
    """It replaces `good`, which stands exactly once in `file`, by `bad`.

    says: what pytest then gives as the error (a regular expression), so that a test that is red for another reason does not count.
    torch: its test needs the trainer's runtime.
    """

    name: str
    file: str
    good: str
    bad: str
    test: str
    says: str
    torch: bool = False

"""The error for a field that breaks a rule."""

from __future__ import annotations


class InvalidField(Exception):
    """A field breaks a rule. `field` is its path, such as `turns[1].logprobs`; `message` says what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

"""The error of a field that a rule refuses. Owner of: nothing."""

from __future__ import annotations


class InvalidField(Exception):
    """field: path such as `turns[1].logprobs`; message: what is wrong with it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field

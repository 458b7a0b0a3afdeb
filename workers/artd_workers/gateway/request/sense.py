"""Refuses values of a request that no engine can use, in one line, before an engine is asked.

Every engine refuses these values too, but its text is about its internals.
"""

from __future__ import annotations

from typing import Any

from artd_workers.gateway.dialect import Dialect
from artd_workers.gateway.errors import invalid


def refuse_senseless(body: dict[str, Any]) -> None:
    """Check the body of a request. Raises ApiError 400 with the name of the value."""
    for name in ("max_tokens", "max_completion_tokens"):
        limit = body.get(name)
        if isinstance(limit, int) and not isinstance(limit, bool) and limit < 1:
            raise invalid(f"{name}={limit}: an answer has at least 1 token", param=name)
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        _refuse_ids(prompt, "prompt")


def drop_grammar(dialect: Dialect, request: dict[str, Any]) -> bool:
    """Remove what binds the samples of a rendered request to a grammar; return whether there was any. Logprobs of forced tokens are the
    grammar's, not the model's: only what is sampled freely can be trained on."""
    found = [name for name in dialect.grammar if request["sampling_params"].get(name)]
    for name in found:
        del request["sampling_params"][name]
    return bool(found)


def _refuse_ids(prompt: list[Any], path: str) -> None:
    for number, token in enumerate(prompt):
        if isinstance(token, list):
            _refuse_ids(token, f"{path}[{number}]")
        elif isinstance(token, int) and token < 0:
            raise invalid(f"{path}[{number}]: {token} is no token id", param="prompt")

"""Makes a reply again from its rows in the ledger, for a client that never had it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from artd_schema.data.trajectory import RouteShape, Turn
from artd_workers.gateway.engine.capture import Capture

from .kinds import Kind
from .live import Sink
from .reply import Reply, add_experts, add_ids
from .request import Job, Json
from .turns import read_floats, read_ints

_BESIDE = ("choices", "engine")
"""What of a raw response is not its head."""


def restore(job: Job, columns: Sequence[Turn], shape: RouteShape | None) -> Reply:
    """Return the reply whose choices these turns hold, as its first client would have had it. shape: of the run's routes."""
    raws = [msgspec.json.decode(turn.raw) for turn in columns]
    head = {name: value for name, value in raws[0].items() if name not in _BESIDE}
    with_ids = job.kind.wants_ids(job.body)
    choices = []
    for raw, turn in zip(raws, columns, strict=True):
        (shown,) = raw["choices"]
        if with_ids:
            prompt, tokens = read_ints(turn.prompt_ids), read_ints(turn.token_ids)
            add_ids(job.kind, shown, prompt, tokens, read_floats(turn.logprobs))
            if turn.routes and shape is not None:
                add_experts(job.kind, shown, Capture(turn.routes, turn.routes_start), shape)
        choices.append(shown)
    if with_ids and job.kind.chat:
        head |= {"prompt_token_ids": read_ints(columns[0].prompt_ids)}
    return Reply(head, choices, bulky=with_ids and shape is not None)


async def show(job: Job, columns: Sequence[Turn], reply: Reply, sink: Sink) -> None:
    """Show a stored reply as a stream: each choice in one piece."""
    n = job.body.get("n") or 1
    head = {name: reply.head[name] for name in ("id", "created", "model", "artd") if name in reply.head}
    await sink.open(head | {"prompt_token_ids": [read_ints(turn.prompt_ids) for turn in columns[::n]], "n": n})
    for choice, turn in zip(reply.choices, columns, strict=True):
        await sink.show(choice["index"], _delta(job.kind, choice), read_ints(turn.token_ids))
    await sink.close(reply.head, reply.choices)


def _delta(kind: Kind, choice: Json) -> Json:
    """Return a whole choice as one delta."""
    scores = choice.get("logprobs") or {}
    if not kind.chat:
        return _drop_empty({"content": choice["text"], "logprobs": _chat_scores(scores)})
    message = choice["message"]
    calls = [call | {"index": index} for index, call in enumerate(message.get("tool_calls") or ())]
    shown = {"content": message.get("content"), "reasoning": message.get("reasoning"), "tool_calls": calls}
    return _drop_empty(shown | {"logprobs": scores.get("content")})


def _drop_empty(delta: Json) -> Json:
    return {name: value for name, value in delta.items() if value}


def _chat_scores(scores: Json) -> list[Any]:
    """Return the logprobs of a completion in the form of chat."""
    if not scores:
        return []
    columns = zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True)
    return [
        {
            "token": token,
            "logprob": logprob,
            "top_logprobs": [{"token": name, "logprob": value} for name, value in (best or {}).items()],
        }
        for token, logprob, best in columns
    ]

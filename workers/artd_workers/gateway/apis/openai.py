"""OpenAI's chat completions and completions, which are the core's own form; their streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from artd_workers.gateway.errors import ApiError
from artd_workers.gateway.http.streamed import Channel, event
from artd_workers.gateway.request.kinds import CHAT, COMPLETION, Kind
from artd_workers.gateway.request.live import Sink

from .base import Ask

Json = dict[str, Any]
_DONE = event(b"[DONE]")


class OpenAiApi:
    """See `Api`."""

    def __init__(self, kind: Kind) -> None:
        self.path = kind.path
        self._kind = kind

    def parse(self, body: Json) -> Ask:
        """See `Api.parse`."""
        return Ask(self._kind, body)

    def reply(self, body: Json, head: Json, choices: Sequence[Json]) -> None:
        """See `Api.reply`."""

    def writer(self, body: Json, channel: Channel) -> Sink:
        """See `Api.writer`."""
        return ChatWriter(channel, body) if self._kind.chat else CompletionWriter(channel, body)

    def error_event(self, error: ApiError) -> bytes:
        """See `Api.error_event`."""
        return event(error.body())


class _Writer:
    """What both endpoints share: chunks with one choice each, the usage, `[DONE]`. body: the client's."""

    kind: Kind
    object: str

    def __init__(self, channel: Channel, body: Json) -> None:
        self._channel = channel
        options = body.get("stream_options")
        self._usage = isinstance(options, dict) and bool(options.get("include_usage"))
        self._with_ids = self.kind.wants_ids(body)
        self._spells_ids = bool(body.get("return_tokens_as_token_ids"))
        self._head = b""
        self._prompts: list[list[int]] = []
        self._n = 1
        self._seen: set[int] = set()

    async def open(self, head: Json) -> None:
        """See `Sink.open`."""
        self._prompts, self._n = head["prompt_token_ids"], head["n"]
        own = {"id": head["id"], "object": self.object, "created": head["created"], "model": head["model"]}
        own |= {"artd": head["artd"]} if "artd" in head else {}
        self._head = msgspec.json.encode(own | ({"usage": None} if self._usage else {}))[:-1] + b',"choices":['

    async def show(self, index: int, delta: Json, token_ids: Sequence[int]) -> None:
        """See `Sink.show`."""
        if self._spells_ids:
            for entry, token in zip(delta.get("logprobs") or (), token_ids, strict=False):
                entry["token"] = f"token_id:{token}"
        choice, tail, first = self._choice(index, delta), b"]}", index not in self._seen
        if self._with_ids:
            choice["token_ids"] = token_ids
            if first:
                tail = self._with_prompt(choice)
        elif not first and self._is_empty(choice):
            return
        self._seen.add(index)
        await self._channel.write(self._chunk(choice, tail))

    async def close(self, head: Json, choices: Sequence[Json]) -> None:
        """See `Sink.close`."""
        ended = [
            self._chunk(self._end(choice["index"]) | {"finish_reason": choice["finish_reason"]}) for choice in choices
        ]
        if self._usage:
            usage = {name: head[name] for name in ("id", "created", "model", "usage")} | {"object": self.object}
            ended.append(event(msgspec.json.encode(usage | {"choices": []})))
        await self._channel.write(b"".join([*ended, _DONE]))

    def _chunk(self, choice: Json, tail: bytes = b"]}") -> bytes:
        return event(b"".join((self._head, msgspec.json.encode(choice), tail)))

    def _prompt(self, index: int) -> list[int]:
        """Return the prompt of a choice."""
        return self._prompts[index // self._n]

    def _choice(self, index: int, delta: Json) -> Json:
        raise NotImplementedError

    def _with_prompt(self, choice: Json) -> bytes:
        """Add the prompt's ids to the first chunk of a choice; return what follows the choice."""
        raise NotImplementedError

    def _end(self, index: int) -> Json:
        raise NotImplementedError

    def _is_empty(self, choice: Json) -> bool:
        raise NotImplementedError


class ChatWriter(_Writer):
    """`chat.completion.chunk`. Reasoning goes by both names that clients know."""

    kind = CHAT
    object = "chat.completion.chunk"

    def _choice(self, index: int, delta: Json) -> Json:
        shown: Json = {name: delta[name] for name in ("content", "tool_calls") if name in delta}
        if reasoning := delta.get("reasoning"):
            shown |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if index not in self._seen:
            shown = {"role": "assistant", "content": ""} | shown
        logprobs = self.kind.scores(delta.get("logprobs") or [])
        return {"index": index, "delta": shown, "logprobs": logprobs, "finish_reason": None}

    def _with_prompt(self, choice: Json) -> bytes:
        return b'],"prompt_token_ids":' + msgspec.json.encode(self._prompt(choice["index"])) + b"}"

    def _end(self, index: int) -> Json:
        return {"index": index, "delta": {}, "logprobs": None}

    def _is_empty(self, choice: Json) -> bool:
        return not choice["delta"] and choice["logprobs"] is None


class CompletionWriter(_Writer):
    """`text_completion`."""

    kind = COMPLETION
    object = "text_completion"

    def __init__(self, channel: Channel, body: Json) -> None:
        super().__init__(channel, body)
        self._offsets: dict[int, int] = {}

    def _choice(self, index: int, delta: Json) -> Json:
        scored = delta.get("logprobs") or []
        offset = self._offsets.get(index, 0)
        self._offsets[index] = offset + sum(len(one["token"]) for one in scored)
        logprobs = self.kind.scores(scored, offset)
        return {"index": index, "text": delta.get("content", ""), "logprobs": logprobs, "finish_reason": None}

    def _with_prompt(self, choice: Json) -> bytes:
        choice["prompt_token_ids"] = self._prompt(choice["index"])
        return b"]}"

    def _end(self, index: int) -> Json:
        return {"index": index, "text": "", "logprobs": None}

    def _is_empty(self, choice: Json) -> bool:
        return not choice["text"] and choice["logprobs"] is None

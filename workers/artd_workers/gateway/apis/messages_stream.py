"""The events of a streamed message: blocks of thinking, text and tools, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

from artd_workers.gateway.http.streamed import Channel, encode_event

from .base import Json
from .messages_words import stop_words


class MessagesWriter:
    """See `Sink`."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._block = -1
        self._kind = ""
        self._call = -1

    async def open(self, head: Json) -> None:
        """See `Sink.open`."""
        usage = {"input_tokens": len(head["prompt_token_ids"][0]), "output_tokens": 0}
        message = {"id": head["id"], "type": "message", "role": "assistant", "model": head["model"], "content": [],
                   "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
        message |= {"artd": head["artd"]} if "artd" in head else {}
        await self._channel.write(_event("message_start", message=message))

    async def show(self, index: int, delta: Json, token_ids: Sequence[int]) -> None:
        """See `Sink.show`."""
        events = []
        if text := delta.get("reasoning"):
            events += self._say(
                "thinking", {"thinking": "", "signature": ""}, {"type": "thinking_delta", "thinking": text}
            )
        if text := delta.get("content"):
            events += self._say("text", {"text": ""}, {"type": "text_delta", "text": text})
        for call in delta.get("tool_calls") or ():
            events += self._call_events(call)
        if events:
            await self._channel.write(b"".join(events))

    async def close(self, head: Json, choices: Sequence[Json]) -> None:
        """See `Sink.close`."""
        (choice,) = choices
        reason, sequence = stop_words(choice)
        usage = {"input_tokens": head["usage"]["prompt_tokens"], "output_tokens": head["usage"]["completion_tokens"]}
        ended = _event("message_delta", delta={"stop_reason": reason, "stop_sequence": sequence}, usage=usage)
        await self._channel.write(b"".join([*self._stop(), ended, _event("message_stop")]))

    def _say(self, kind: str, empty: Json, delta: Json) -> list[bytes]:
        begun = [] if self._kind == kind else self._begin(kind, empty)
        return [*begun, _event("content_block_delta", index=self._block, delta=delta)]

    def _call_events(self, call: Json) -> list[bytes]:
        function, events = call.get("function") or {}, []
        if self._kind != "tool_use" or call["index"] != self._call:
            self._call = call["index"]
            events = self._begin("tool_use", {"id": call.get("id", ""), "name": function.get("name", ""), "input": {}})
        if arguments := function.get("arguments"):
            delta = {"type": "input_json_delta", "partial_json": arguments}
            events.append(_event("content_block_delta", index=self._block, delta=delta))
        return events

    def _begin(self, kind: str, empty: Json) -> list[bytes]:
        ended = self._stop()
        self._block, self._kind = self._block + 1, kind
        return [*ended, _event("content_block_start", index=self._block, content_block={"type": kind} | empty)]

    def _stop(self) -> list[bytes]:
        if self._block < 0:
            return []
        signed = []
        if self._kind == "thinking":
            delta = {"type": "signature_delta", "signature": ""}
            signed.append(_event("content_block_delta", index=self._block, delta=delta))
        return [*signed, _event("content_block_stop", index=self._block)]


def _event(kind: str, **fields: object) -> bytes:
    return encode_event({"type": kind} | fields, kind)

"""The events of a streamed response: items of reasoning, text and calls, one after the other, each with its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from artd_workers.gateway.http.streamed import Channel, encode_event

from .base import Json, item_id
from .response_items import begun_response, call_item, message_item, reasoning_item, response_of


class ResponsesWriter:
    """See `Sink`. body: the client's."""

    def __init__(self, body: Json, channel: Channel) -> None:
        self._body = body
        self._channel = channel
        self._number = 0
        self._output: list[Json] = []
        self._item: _Item | None = None

    async def open(self, head: Json) -> None:
        """See `Sink.open`."""
        response = begun_response(self._body, head)
        await self._write(
            ("response.created", {"response": response}), ("response.in_progress", {"response": response})
        )

    async def show(self, index: int, delta: Json, token_ids: Sequence[int]) -> None:
        """See `Sink.show`."""
        events: list[tuple[str, Json]] = []
        if text := delta.get("reasoning"):
            events += self._say(_Reasoning, text)
        if text := delta.get("content"):
            events += self._say(_Message, text)
        for call in delta.get("tool_calls") or ():
            function = call.get("function") or {}
            if not isinstance(self._item, _Call) or self._item.index != call["index"]:
                made = _Call(
                    len(self._output) + (self._item is not None),
                    call["index"],
                    call.get("id", ""),
                    function.get("name", ""),
                )
                events += [*self._end(), *self._begin(made)]
            if self._item is not None and (arguments := function.get("arguments")):
                events.append(self._item.add(arguments))
        await self._write(*events)

    async def close(self, head: Json, choices: Sequence[Json]) -> None:
        """See `Sink.close`."""
        (choice,) = choices
        events = self._end()
        if not self._output:
            events += [*self._begin(_Message(0)), *self._end()]
        response = response_of(self._body, head, choice, self._output)
        await self._write(*events, (f"response.{response['status']}", {"response": response}))

    def _say(self, kind: type[_Item], text: str) -> list[tuple[str, Json]]:
        begun: list[tuple[str, Json]] = []
        if not isinstance(self._item, kind):
            begun = self._end()
            begun += self._begin(kind(len(self._output)))
        assert self._item is not None
        return [*begun, self._item.add(text)]

    def _begin(self, item: _Item) -> list[tuple[str, Json]]:
        self._item = item
        return item.begin()

    def _end(self) -> list[tuple[str, Json]]:
        if (item := self._item) is None:
            return []
        self._item = None
        self._output.append(item.whole())
        return [*item.end(), ("response.output_item.done", {"output_index": item.place, "item": item.whole()})]

    async def _write(self, *events: tuple[str, Json]) -> None:
        written = []
        for kind, fields in events:
            written.append(encode_event({"type": kind, "sequence_number": self._number} | fields, kind))
            self._number += 1
        if written:
            await self._channel.write(b"".join(written))


class _Item:
    """One item while it comes. place: its index in the output."""

    prefix = ""
    word = ""

    def __init__(self, place: int) -> None:
        self.place = place
        self.name = item_id(self.prefix)
        self.text = ""

    def begin(self) -> list[tuple[str, Json]]:
        """Return the events that begin it."""
        return [("response.output_item.added", {"output_index": self.place, "item": self.whole() | self.empty()})]

    def add(self, text: str) -> tuple[str, Json]:
        """Return the event of more text."""
        self.text += text
        return f"response.{self.word}.delta", self.where() | {"delta": text}

    def end(self) -> list[tuple[str, Json]]:
        """Return the events that end it, but the last."""
        raise NotImplementedError

    def whole(self) -> Json:
        """Return the item as it is now."""
        raise NotImplementedError

    def empty(self) -> Json:
        """Return what the item has at its beginning in place of what it ends with."""
        return {"status": "in_progress", "content": []}

    def where(self) -> Json:
        """Return what events of its text say of their place."""
        return {"item_id": self.name, "output_index": self.place, "content_index": 0}


class _Reasoning(_Item):
    prefix, word = "rs", "reasoning_text"

    def end(self) -> list[tuple[str, Json]]:
        return [("response.reasoning_text.done", self.where() | {"text": self.text})]

    def whole(self) -> Json:
        return reasoning_item(self.name, self.text)


class _Message(_Item):
    prefix, word = "msg", "output_text"

    def begin(self) -> list[tuple[str, Json]]:
        return [*super().begin(), ("response.content_part.added", self.where() | {"part": self._part()})]

    def add(self, text: str) -> tuple[str, Json]:
        kind, fields = super().add(text)
        return kind, fields | {"logprobs": []}

    def end(self) -> list[tuple[str, Json]]:
        done = ("response.output_text.done", self.where() | {"text": self.text, "logprobs": []})
        return [done, ("response.content_part.done", self.where() | {"part": self._part()})]

    def whole(self) -> Json:
        return message_item(self.name, self.text)

    def _part(self) -> Any:
        return self.whole()["content"][0]


class _Call(_Item):
    prefix, word = "fc", "function_call_arguments"

    def __init__(self, place: int, index: int, call_id: str, function: str) -> None:
        super().__init__(place)
        self.index = index
        self._call_id = call_id
        self._function = function

    def end(self) -> list[tuple[str, Json]]:
        return [
            ("response.function_call_arguments.done", self.where() | {"name": self._function, "arguments": self.text})
        ]

    def whole(self) -> Json:
        return call_item(self.name, self._call_id, self._function, self.text)

    def empty(self) -> Json:
        return {"status": "in_progress"}

    def where(self) -> Json:
        return {"item_id": self.name, "output_index": self.place}

"""A trajectory as people read it: its sequences, each with its messages and what is known of every token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from artd_schema.codec import UNREADABLE
from artd_schema.data.route_rules import goes_on
from artd_schema.data.trajectory import Turn

from . import chat
from .tokenizer import Tokenizer, texts


class Message(Struct, frozen=True, kw_only=True):
    """One message of a conversation.

    `role` is as the chat template spells it, `prompt` if the prompt has no roles. `thinking` is the text up to
    `</think>`. `tool_calls` has {name, arguments} of each call that the engine's parser found in a sampled message.
    `turn` is the number of the turn that sampled it, -1 for context.
    """

    role: str
    text: str
    thinking: str = ""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    turn: int = -1

    @property
    def sampled(self) -> bool:
        return self.turn >= 0


class TokenView(Struct, frozen=True, kw_only=True):
    """One token, for people.

    `logprob` is natural log, as the engine sampled the token. `epoch` and `cache` are the policy epochs of the weights
    that sampled it and that computed its KV cache. All three are None for context; the epochs are also None if unknown.
    `turn` is the turn that sampled it, -1 for context.
    """

    id: int
    text: str
    turn: int = -1
    logprob: float | None = None
    epoch: int | None = None
    cache: int | None = None


class Passage(Struct, frozen=True, kw_only=True):
    """One sequence: turns whose prompts continue each other, token by token."""

    tokens: list[TokenView]
    messages: list[Message]


def read_turns(turns: Sequence[Turn], tokenizer: Tokenizer | None) -> list[Passage]:
    """Return the sequences of a trajectory, in the order of their first turn.

    Without a tokenizer a token's text is empty. Context is then described by its length, and an answer by the engine's
    text.
    """
    said = [_said(turn) for turn in turns]
    return [_passage(tokens, tokenizer, said) for tokens in _sequences(turns)]


def _sequences(turns: Sequence[Turn]) -> Iterator[list[TokenView]]:
    """Yield the tokens of each sequence, without text."""
    tokens: list[TokenView] = []
    sequence = b""
    for number, turn in enumerate(turns):
        if not goes_on(turn, sequence):
            yield tokens
            tokens, sequence = [], b""
        tokens += [TokenView(id=one, text="") for one in _column("i", turn.prompt_ids[len(sequence) :])]
        tokens += _view_sampled(turn, number)
        sequence = turn.prompt_ids + turn.token_ids
    if tokens:
        yield tokens


def _view_sampled(turn: Turn, number: int) -> Iterator[TokenView]:
    ids = _column("i", turn.token_ids)
    epochs, caches = (_spread(spans, len(ids)) for spans in (turn.policy_epoch, turn.kv_cache_epoch))
    for one, logprob, epoch, cache in zip(ids, _column("f", turn.logprobs), epochs, caches, strict=True):
        yield TokenView(id=one, text="", turn=number, logprob=logprob, epoch=epoch, cache=cache)


def _spread(spans: Sequence[tuple[int, int]], count: int) -> list[int | None]:
    """Return the epoch of each of `count` tokens, by (first token, epoch) spans."""
    found: list[int | None] = [None] * count
    for start, epoch in spans:
        found[start:] = [epoch] * (count - start)
    return found


def _passage(tokens: list[TokenView], tokenizer: Tokenizer | None, said: Sequence[dict[str, Any]]) -> Passage:
    if tokenizer is None:
        return Passage(tokens=tokens, messages=list(_without_text(tokens, said)))
    pieces = tokenizer.pieces(token.id for token in tokens)
    spelt = texts(pieces)
    parts = chat.split(
        chat.Token(text, piece.marker, piece.special, token.turn)
        for text, piece, token in zip(spelt, pieces, tokens, strict=True)
    )
    views = [msgspec.structs.replace(token, text=text) for token, text in zip(tokens, spelt, strict=True)]
    return Passage(tokens=views, messages=[_message(part, said) for part in parts])


def _message(part: chat.Part, said: Sequence[dict[str, Any]]) -> Message:
    thought, text = chat.thinking(part.text)
    calls = _calls(said[part.turn]) if part.turn >= 0 else []
    return Message(role=part.role, text=text, thinking=thought, tool_calls=calls, turn=part.turn)


def _without_text(tokens: list[TokenView], said: Sequence[dict[str, Any]]) -> Iterator[Message]:
    """Yield the messages of a sequence whose tokens have no text."""
    start = 0
    for at, token in enumerate(tokens):
        if at + 1 < len(tokens) and tokens[at + 1].turn == token.turn:
            continue
        count, start = at + 1 - start, at + 1
        if token.turn < 0:
            yield Message(role="prompt", text=f"[{count} tokens]")
            continue
        told = said[token.turn]
        text, thought = (told.get(name) for name in ("content", "reasoning_content"))
        yield Message(
            role="assistant", text=text if isinstance(text, str) else f"[{count} tokens]",
            thinking=thought if isinstance(thought, str) else "", tool_calls=_calls(told), turn=token.turn,
        )  # fmt: skip


def _said(turn: Turn) -> dict[str, Any]:
    """Return the message of a chat response, or {content} of a completion, as the engine's parser made it; {} if it is unknown."""
    try:
        raw = msgspec.json.decode(turn.raw) if turn.raw else {}
        choice = raw["choices"][0]
        message = choice.get("message")
        return message if isinstance(message, dict) else {"content": choice.get("text")}
    except (*UNREADABLE, LookupError, TypeError, AttributeError):
        return {}  # a client by value may have written anything


def _calls(said: dict[str, Any]) -> list[dict[str, str]]:
    calls = said.get("tool_calls")
    functions = [one.get("function") for one in calls if isinstance(one, dict)] if isinstance(calls, list) else []
    return [
        {"name": str(one.get("name", "")), "arguments": str(one.get("arguments", ""))}
        for one in functions
        if isinstance(one, dict)
    ]


def _column(kind: str, raw: bytes) -> array[Any]:
    """Return a little-endian column as an array. `kind` is `i` for int32, `f` for float32."""
    column = array(kind)
    column.frombytes(raw)
    if sys.byteorder == "big":
        column.byteswap()
    return column

"""Turns token ids into text by the `tokenizer.json` of a model folder.

artd only decodes here, so it does not need the `tokenizers` package: that builds the merges of a vocabulary too, which takes longer than a
whole `artctl samples` may. This reads the vocabulary alone.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field

from artd_schema.codec import UNREADABLE

FILE = "tokenizer.json"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Unreadable(Exception):
    """A model folder has no `tokenizer.json`, or one that artd cannot decode with. The text says which and why."""


class Piece(NamedTuple):
    """What one token adds to the text. `marker` says that the tokenizer added it to its vocabulary, such as
    `<|im_start|>`. `special` says that it is a marker which belongs to no message."""

    raw: bytes
    marker: bool
    special: bool


class _Added(Struct):
    id: int
    content: str
    special: bool = False


class _Step(Struct):
    """One step of a tokenizer's decoder, with the fields of every type that artd knows."""

    type: str
    decoders: list[_Step] = field(default_factory=list)
    pattern: dict[str, str] = field(default_factory=dict)
    content: str = ""
    start: int = 0
    replacement: str = "▁"
    prepend_scheme: str = "always"
    add_prefix_space: bool = True


class _Model(Struct):
    vocab: dict[str, int] | list[tuple[str, float]]


class _File(Struct):
    model: _Model
    added_tokens: list[_Added] = field(default_factory=list)
    decoder: _Step | None = None


class _Rules(NamedTuple):
    """How entries of the vocabulary become text. `to_bytes` gives an entry's bytes, `joined_by` separates two tokens,
    `strip` is the number of spaces that are removed from the beginning."""

    to_bytes: Callable[[str], bytes]
    joined_by: bytes
    strip: int


class Tokenizer:
    """The vocabulary of one model."""

    def __init__(self, content: bytes) -> None:
        """Read the content of a `tokenizer.json`. Raises Unreadable."""
        try:
            file = msgspec.json.decode(content, type=_File)
        except UNREADABLE as error:
            raise Unreadable(f"{FILE} cannot be read: {error}") from None
        self._rules = _rules(file.decoder)
        vocab = file.model.vocab
        if isinstance(vocab, dict):
            self._words = {number: word for word, number in vocab.items()}
        else:
            self._words = {number: word for number, (word, _) in enumerate(vocab)}
        self._added = {one.id: one for one in file.added_tokens}

    def pieces(self, ids: Iterable[int]) -> list[Piece]:
        """Return one piece a token, whose bytes together are the text of the whole sequence in UTF-8."""
        found: list[Piece] = []
        for number in ids:
            piece = self._piece(number)
            if found and self._rules.joined_by:
                piece = piece._replace(raw=self._rules.joined_by + piece.raw)
            elif self._rules.strip and not found:
                piece = piece._replace(raw=_strip(piece.raw, self._rules.strip))
            found.append(piece)
        return found

    def _piece(self, number: int) -> Piece:
        added = self._added.get(number)
        if added is not None:
            return Piece(self._rules.to_bytes(added.content), True, added.special)
        word = self._words.get(number)
        if word is None:
            return Piece(f"<token {number}>".encode(), False, False)  # a model's vocabulary may be padded
        return Piece(self._rules.to_bytes(word), False, False)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a sequence, special tokens included; U+FFFD stands for bytes that are not UTF-8."""
        return b"".join(piece.raw for piece in self.pieces(ids)).decode(errors="replace")


def texts(pieces: Iterable[Piece]) -> list[str]:
    """Return the text of each piece; the last token of a character that several tokens spell has it."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    found = [decoder.decode(piece.raw) for piece in pieces]
    if found:
        found[-1] += decoder.decode(b"", True)
    return found


def load(folder: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder. Raises Unreadable."""
    path = Path(folder) / FILE
    try:
        return Tokenizer(path.read_bytes())
    except OSError as error:
        raise Unreadable(f"{path} cannot be read: {error.strerror or error}") from None
    except Unreadable as error:
        raise Unreadable(f"{Path(folder)}: {error}") from None


def _rules(decoder: _Step | None) -> _Rules:
    """Return the rules of a decoder. Raises Unreadable for a decoder that artd does not know."""
    if decoder is None:
        return _Rules(lambda word: word.encode(errors="replace"), b" ", 0)
    steps = [decoder] if decoder.type != "Sequence" else decoder.decoders
    changes: list[Callable[[str], Any]] = []
    strip = 0
    for step in steps:
        match step.type:
            case "ByteLevel":
                return _Rules(_byte_level, b"", 0)
            case "Replace" if "String" in step.pattern:
                changes.append(_replace(step.pattern["String"], step.content))
            case "Metaspace":
                changes.append(_replace(step.replacement, " "))
                strip = int(step.prepend_scheme != "never" and step.add_prefix_space)
            case "Strip" if step.content == " ":
                strip = step.start
            case "ByteFallback" | "Fuse":
                pass  # `_fallback` looks at every word
            case kind:
                raise Unreadable(f"{FILE} has a decoder of type {kind}, which artd does not know")
    with_bytes = any(step.type == "ByteFallback" for step in steps)

    def to_bytes(word: str) -> bytes:
        if with_bytes and (byte := _BYTE.fullmatch(word)):
            return bytes([int(byte[1], 16)])
        for change in changes:
            word = change(word)
        return word.encode(errors="replace")

    return _Rules(to_bytes, b"", strip)


def _replace(old: str, new: str) -> Callable[[str], str]:
    return lambda word: word.replace(old, new)


def _strip(raw: bytes, most: int) -> bytes:
    while most and raw.startswith(b" "):
        raw, most = raw[1:], most - 1
    return raw


@cache
def _spelling() -> dict[str, int]:
    """Return the byte that each character of a byte-level vocabulary stands for (GPT-2, `bytes_to_unicode`): printable Latin-1 characters for
    themselves, the other bytes in order from U+0100 on."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + at): byte for at, byte in enumerate(others)}


def _byte_level(word: str) -> bytes:
    known = _spelling()
    try:
        return bytes([known[sign] for sign in word])
    except KeyError:
        return word.encode(errors="replace")

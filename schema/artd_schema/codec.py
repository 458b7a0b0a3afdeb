"""Codecs for the wire and for disk: msgpack on the wire, JSON on disk, sha256 hex digests.

Frames of every message: [MAGIC, header, bulk...]. Decoding never raises anything but `WireError`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec

MAGIC = b"A1"
T = TypeVar("T")


UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was expected."""


class WireError(Exception):
    """A message that cannot be decoded: wrong magic, unknown tag, missing field, too few frames."""


def prepare(*kinds: Any) -> None:
    """Have msgspec prepare these types now. Otherwise it does so at a type's first use, and crashed when two threads
    used a new type at once (the daemon's loop and its writer, at a boot)."""
    for kind in kinds:
        msgspec.json.Decoder(kind)


class Codec(Generic[T]):
    """Encodes and decodes one direction of one socket. `kind` is a union of tagged Structs."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._encoder = msgspec.msgpack.Encoder()

    def encode(self, message: object, bulk: Sequence[bytes] = ()) -> list[bytes]:
        return [MAGIC, self._encoder.encode(message), *bulk]

    def decode(self, frames: Sequence[bytes]) -> tuple[T, list[bytes]]:
        if len(frames) < 2 or frames[0] != MAGIC:
            raise WireError(f"not an artd message: {len(frames)} frames")
        try:
            return self._decoder.decode(frames[1]), list(frames[2:])
        except UNREADABLE as error:
            raise WireError(str(error)) from None


def to_json(value: object) -> bytes:
    """Return canonical JSON: keys are sorted, so equal values have equal digests."""
    return msgspec.json.encode(value, order="sorted")


def digest(data: bytes) -> str:
    """Return the sha256 in hex."""
    return hashlib.sha256(data).hexdigest()

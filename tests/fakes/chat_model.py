"""A model folder whose tokenizer spells every byte, with the markers of ChatML as tokens of their own, and turns in its ids."""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from artd_schema.data.trajectory import Turn

MARKERS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_SPECIAL = ("<|im_start|>", "<|im_end|>")


def _alphabet() -> list[str]:
    """The character of each byte in a byte-level vocabulary."""
    own = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in own else chr(next(others)) for byte in range(256)]


def write_model(folder: Path) -> Path:
    """Write `tokenizer.json`; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    added = [{"id": 256 + at, "content": name, "special": name in _SPECIAL} for at, name in enumerate(MARKERS)]
    vocab = {sign: byte for byte, sign in enumerate(_alphabet())}
    content = {
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
        "added_tokens": added,
        "decoder": {"type": "ByteLevel"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder


def ids(text: str) -> list[int]:
    """Tokens of a text in which markers are tokens."""
    found: list[int] = []
    for part in re.split(f"({'|'.join(map(re.escape, MARKERS))})", text):
        found += [256 + MARKERS.index(part)] if part in MARKERS else list(part.encode())
    return found


def turn(prompt: str, answer: str, logprobs: Sequence[float] = (), **fields: Any) -> Turn:
    """One turn. logprobs: of the sampled tokens; without them each has -0.5."""
    sampled = ids(answer)
    return Turn(
        prompt_ids=array("i", ids(prompt)).tobytes(), token_ids=array("i", sampled).tobytes(),
        logprobs=array("f", logprobs or [-0.5] * len(sampled)).tobytes(), **fields,
    )  # fmt: skip


def body(*turns: Turn) -> bytes:
    """A trajectory's body."""
    return msgspec.msgpack.encode(list(turns))

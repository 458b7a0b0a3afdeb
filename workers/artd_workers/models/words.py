"""A tokenizer made on the spot: words `w0`, `w1`, ... apart by white space, without any special token.

Purpose: random models need token ids to have a spelling, and nothing that ends a sequence but its length. Owner of: no state.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder import write_json

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tokenizer(folder: Path, size: int, length: int) -> None:
    """`tokenizer.json` and its settings. size: words, any other one is `w0`; length: longest sequence."""
    words = {f"w{number}": number for number in range(size)}
    unused: dict[str, Any] = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    tokenizer = unused | {
        "version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    }  # fmt: skip
    write_json(folder / "tokenizer.json", tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE,
                "model_max_length": length, "clean_up_tokenization_spaces": False}  # fmt: skip
    write_json(folder / "tokenizer_config.json", settings)

"""Makes a tokenizer of words `w0`, `w1`, ... separated by white space, without any special token.

Random models need token ids that have a spelling, and nothing but length may end a sequence.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .folder import write_json

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write_tokenizer(folder: Path, size: int, length: int) -> None:
    """Write `tokenizer.json` and its settings. `size`: number of words, any other word is `w0`; `length`: longest sequence in
    tokens."""
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

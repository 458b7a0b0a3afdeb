"""Token ids have the text that the `tokenizers` package gives them, by the decoders of Llama 3 and Qwen (byte-level), Llama 2 and Gemma
(byte fallback), T5 (Metaspace) and artd's own seeded models (words)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from artd_schema.text.tokenizer import Tokenizer as Ours

TEXTS = [
    "Hello, world! naïve café — 你好 👩‍👩‍👧 \t x\n\n  deux",
    "<|im_start|>user\nÀ é<think>ok</think>",
    " a  b ",
    "",
]
QUIET = {"show_progress": False}


def byte_level() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, special_tokens=["<|im_start|>"], **QUIET)
    )
    made.add_tokens([AddedToken("<think>", special=False), AddedToken(" é", special=False)])
    return made


def byte_fallback() -> Tokenizer:
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    known = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    made.train_from_iterator(["Hello world a b"], trainers.BpeTrainer(special_tokens=known, **QUIET))
    return made


def metaspace() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    made.train_from_iterator(
        TEXTS, trainers.UnigramTrainer(vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", **QUIET)
    )
    return made


def words() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return made


@pytest.mark.parametrize("make", [byte_level, byte_fallback, metaspace, words])
def test_text_is_that_of_tokenizers(make: Callable[[], Tokenizer]) -> None:
    theirs = make()
    ours = Ours(theirs.to_str().encode())
    encoded = [theirs.encode(text).ids for text in TEXTS]
    assert max(map(len, encoded)) > 5
    for ids in encoded:
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=False)

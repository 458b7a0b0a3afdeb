"""Token ids to text: the tokenizer's decoders, who said what, and what is known of each token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from artd_schema.text import chat, tokenizer, transcript
from tests.fakes.chat_model import MARKERS, ids, turn, write_model

HELLO = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHé?\n\nline 2<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def words(tmp_path: Path) -> tokenizer.Tokenizer:
    return tokenizer.load(write_model(tmp_path))


def made(decoder: dict[str, Any] | None, *vocab: str, kind: str = "BPE") -> tokenizer.Tokenizer:
    words: Any = {word: at for at, word in enumerate(vocab)} if kind != "Unigram" else [[word, -1.0] for word in vocab]
    content = {"model": {"type": kind, "vocab": words}, "decoder": decoder, "added_tokens": []}
    return tokenizer.Tokenizer(json.dumps(content).encode())


def test_bytes_that_several_tokens_spell(words: tokenizer.Tokenizer) -> None:
    text = "naïve 👩 — 你好\n\t"
    assert words.decode(ids(text)) == text
    pieces = words.pieces(ids("é!"))
    assert tokenizer.texts(pieces) == ["", "é", "!"]
    assert tokenizer.texts(pieces[:1]) == ["\ufffd"]
    assert words.decode([999]) == "<token 999>"


LLAMA_2 = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}  # fmt: skip


def test_the_decoders_of_sentencepiece() -> None:
    assert made(LLAMA_2, "▁Hello", "▁world", "<0xC3>", "<0xA9>").decode([0, 1, 2, 3]) == "Hello worldé"
    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    assert made(metaspace, "▁Hello", "▁world", kind="Unigram").decode([0, 1]) == "Hello world"
    assert made(metaspace | {"prepend_scheme": "never"}, "▁a").decode([0, 0]) == " a a"
    assert made(None, "w0", "w1", kind="WordLevel").decode([1, 0]) == "w1 w0"


def test_what_cannot_be_decoded_is_said(tmp_path: Path) -> None:
    with pytest.raises(tokenizer.Unreadable, match="decoder of type CTC, which artd does not know"):
        made({"type": "CTC"}, "a")
    with pytest.raises(tokenizer.Unreadable, match=r"tokenizer\.json cannot be read: No such file"):
        tokenizer.load(tmp_path / "gone")
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    with pytest.raises(tokenizer.Unreadable, match="missing required field `vocab`"):
        tokenizer.load(tmp_path)


def read(words: tokenizer.Tokenizer | None, *turns: transcript.Turn) -> list[list[tuple[str, str, int]]]:
    return [[(m.role, m.text, m.turn) for m in each.messages] for each in transcript.read_turns(turns, words)]


def test_roles_come_from_markers(words: tokenizer.Tokenizer) -> None:
    first = turn(HELLO, "Yes.<|im_end|>")
    told = [("system", "Be brief.", -1), ("user", "Hé?\n\nline 2", -1), ("assistant", "Yes.", 0)]
    assert read(words, first) == [told]


def test_a_role_that_is_only_spelt_is_text() -> None:
    tokens = [chat.Token(text, False, False, -1) for text in ("<|im_start|>", "system\nObey.", "<|im_end|>")]
    assert chat.split(tokens) == [chat.Part("prompt", "<|im_start|>system\nObey.<|im_end|>", -1)]


def test_turns_that_continue_each_other_are_one_sequence(words: tokenizer.Tokenizer) -> None:
    first = turn(HELLO, "One.<|im_end|>", policy_epoch=((0, 3), (2, 4)), kv_cache_epoch=((0, 3),))
    more = "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    second = turn(f"{HELLO}One.<|im_end|>{more}", "Two.")
    other = turn("no chat at all", "an answer")
    one, two = read(words, first, second, other)
    assert one[2:] == [("assistant", "One.", 0), ("user", "And?", -1), ("assistant", "Two.", 1)]
    assert two == [("prompt", "no chat at all", -1), ("assistant", "an answer", 2)]
    tokens = transcript.read_turns([first], words)[0].tokens
    assert "".join(token.text for token in tokens) == HELLO + "One.<|im_end|>"
    assert [(t.logprob, t.epoch, t.cache) for t in tokens[-5:]] == [(-0.5, epoch, 3) for epoch in (3, 3, 4, 4, 4)]
    assert {t.logprob for t in tokens[:-5]} == {None}


def test_thinking_and_tool_calls(words: tokenizer.Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    raw = json.dumps({"choices": [{"message": {"content": None, "tool_calls": [call]}}]}).encode()
    [begun] = transcript.read_turns([turn(f"{HELLO}<think>\n", "hm</think>\n\nYes.<|im_end|>", raw=raw)], words)
    last = begun.messages[-1]
    assert (last.thinking, last.text, last.turn) == ("hm", "Yes.", 0)
    assert last.tool_calls == [{"name": "add", "arguments": '{"a": 1}'}]
    [own] = transcript.read_turns([turn(HELLO, "<think>a</think>b", raw=b"{not json")], words)
    assert (own.messages[-1].thinking, own.messages[-1].text, own.messages[-1].tool_calls) == ("a", "b", [])


def test_an_answer_that_is_its_end_alone_and_a_role_that_the_model_made_up(words: tokenizer.Tokenizer) -> None:
    assert read(words, turn(HELLO, "<|im_end|><|im_end|>"))[0][-1] == ("assistant", "", 0)
    made_up = read(words, turn(HELLO, "a<|im_end|><|im_start|>user\nmore"))[0]
    assert made_up[-2:] == [("assistant", "a", 0), ("user", "more", 0)]


def test_without_a_tokenizer_the_engine_is_quoted() -> None:
    raw = json.dumps({"choices": [{"message": {"content": "Yes.", "reasoning_content": "hm"}}]}).encode()
    completion = json.dumps({"choices": [{"text": "so"}]}).encode()
    assert read(None, turn("abc", "de", raw=raw)) == [[("prompt", "[3 tokens]", -1), ("assistant", "Yes.", 0)]]
    assert read(None, turn("abc", "de", raw=completion))[0][1][1] == "so"
    assert read(None, turn("abc", "de"))[0][1][1] == "[2 tokens]"


@pytest.mark.parametrize(
    "parts",
    [
        ("<|start_header_id|>", "user", "<|end_header_id|>", "\n\nHi", "<|eot_id|>"),
        ("<start_of_turn>", "user", "\nHi", "<end_of_turn>", "\n"),
        ("<|user|>", "\nHi", "<|assistant|>"),
        ("<｜User｜>", "Hi", "<｜Assistant｜>"),
        ("[INST]", "Hi", "[/INST]"),
        ("<|start|>", "user", "<|message|>", "Hi", "<|end|>"),
    ],
    ids=lambda parts: parts[0],
)
def test_chat_templates(parts: tuple[str, ...]) -> None:
    def is_marker(text: str) -> bool:
        return text[0] in "<[" and text[-1] in ">]"

    tokens = [chat.Token(text, is_marker(text), is_marker(text), -1) for text in parts]
    assert chat.split(tokens) == [chat.Part("user", "Hi", -1)]
    assert MARKERS[0] in chat.HEADERS

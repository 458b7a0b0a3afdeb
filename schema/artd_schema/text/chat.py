"""Finds who said what in a decoded sequence, by the markers of the chat templates in use.

A marker counts only where it is a token of its own. Text that merely spells one, which a user can write, opens no message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

HEADERS = {
    "<|im_start|>": "\n",  # ChatML: Qwen, SmolLM2
    "<|start_header_id|>": "<|end_header_id|>",  # Llama 3
    "<|header_start|>": "<|header_end|>",  # Llama 4
    "<start_of_turn>": "\n",  # Gemma
    "<|start|>": "<|message|>",  # Harmony
}
"""The token before a role's name, and what ends the name: another token or a newline."""
ROLES = {
    "<|system|>": "system", "<|user|>": "user", "<|assistant|>": "assistant", "<|observation|>": "tool",  # GLM, Phi
    "<｜User｜>": "user", "<｜Assistant｜>": "assistant",  # DeepSeek
    "[SYSTEM_PROMPT]": "system", "[/SYSTEM_PROMPT]": "", "[INST]": "user", "[/INST]": "assistant",  # Mistral
    "[TOOL_RESULTS]": "tool", "[/TOOL_RESULTS]": "assistant",
}  # fmt: skip
"""Tokens that are a role by themselves."""
ENDS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<end_of_turn>", "<|end|>", "<|return|>", "<|call|>", "<|endoftext|>",
     "<｜end▁of▁sentence｜>", "</s>", "<eos>"}
)  # fmt: skip
SPEAKERS = ("assistant", "model")
"""Roles whose message the policy writes."""
_THINKING = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)


class Token(NamedTuple):
    """A token with its text. `marker` and `special` are as in `tokenizer.Piece`. `turn` is the turn that sampled it, -1
    for context."""

    text: str
    marker: bool
    special: bool
    turn: int


class Part(NamedTuple):
    """One message. `role` is as the template spells it, `prompt` if it has no roles. `turn` is the turn that sampled
    it, -1 for context."""

    role: str
    text: str
    turn: int


def split(tokens: Iterable[Token]) -> list[Part]:
    """Return the messages of one sequence, in order. The tokens that a turn sampled are a message of their own, with
    the role at the end of its prompt."""
    reading = _Reading()
    for token in tokens:
        reading.add(token)
    reading.close()
    return reading.parts


def thinking(text: str) -> tuple[str, str]:
    """Split a message into (thinking, the rest). The thinking ends at the first `</think>`, and is "" without one."""
    found = _THINKING.match(text)
    return (found[1].strip(), text[found.end() :]) if found else ("", text)


class _Reading:
    """The messages so far, and the one that is being read.

    `header` is the text that ends the role's name while that is being read, "" after it. `named_by` is the turn that
    sampled the role's name, -1 for the template. `ended` has the turns whose message is complete.
    """

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._role = ""
        self._text = ""
        self._turn = -1
        self._header = ""
        self._named_by = -1
        self._ended: set[int] = set()

    def add(self, token: Token) -> None:
        if token.marker and token.text in HEADERS:
            self._open("", token.turn)
            self._header = HEADERS[token.text]
        elif self._header:
            self._read_role(token)
        elif token.marker and token.text in ROLES:
            self._open(ROLES[token.text], token.turn)
        elif token.marker and token.text in ENDS:
            if token.turn < 0 or token.turn not in self._ended:  # an answer may consist of its end token alone
                self._say("", token.turn)
            self._open("", -1)
        else:
            self._say("" if token.special else token.text, token.turn)

    def close(self) -> None:
        text = self._text if self._turn >= 0 else self._text.strip("\n")
        if text.strip() or self._turn >= 0:
            self.parts.append(Part(self._role or "prompt", text, self._turn))
            self._ended.add(self._turn)
        self._text, self._turn = "", -1

    def _open(self, role: str, turn: int) -> None:
        self.close()
        self._role, self._named_by, self._header = role, turn, ""

    def _read_role(self, token: Token) -> None:
        name, end, rest = token.text.partition(self._header) if self._header == "\n" else (token.text, "", "")
        if token.text == self._header:
            name, end = "", self._header
        self._text += name
        if end:
            self._role, self._header, self._text = self._text.strip(), "", ""
            if rest:
                self._say(rest, token.turn)

    def _say(self, text: str, turn: int) -> None:
        """Add text. An answer keeps what the template began it with, such as `<think>`."""
        if turn != self._turn:
            begun = self._turn < 0 and (self._role.startswith(SPEAKERS) or self._named_by >= 0)
            if not begun:
                self.close()
                self._role = "assistant" if turn >= 0 else ""
        self._text += text
        self._turn = turn

"""One trajectory as a client reads it: its text, its messages, its turns, and what became of it."""

from __future__ import annotations

from typing import Any

import msgspec

from artd_schema.data.trajectory import Turn
from artd_schema.text.plain import paragraph
from artd_schema.text.tokenizer import Tokenizer, Unreadable
from artd_schema.text.transcript import Message, Passage, read_turns
from artd_schema.wire import client_api as api

from .connection import Connection

_turns = msgspec.msgpack.Decoder(list[Turn])


class Trajectory:
    """A trajectory for reading. `Run.trajectory` and `Run.samples` make it.

    - `row`: its columns (docs/cli-json.md).
    - `turns`: its turns, without routes.
    - `sequences`: each has `tokens` and `messages`. Turns whose prompts continue each other are one sequence.
    - `advantage`: that of its sampled tokens. None if it is in no batch, or was left out of its batch's rows.
    - `problem`: why it has no text, or only what the engine said of its answers; "" if nothing is wrong.
    """

    def __init__(self, found: api.Body, tokenizer: Tokenizer | None, problem: str) -> None:
        self.row: dict[str, Any] = found.row
        self.advantage = found.advantage
        self.problem = found.problem or problem
        self.turns: list[Turn] = _turns.decode(found.body) if found.body else []
        self.sequences: list[Passage] = read_turns(self.turns, tokenizer)

    def __repr__(self) -> str:
        return f"<Trajectory {self.id} of group {self.group!r}: {self.state}, reward {self.reward:g}>"

    def __str__(self) -> str:
        """Return `text` for a terminal: control characters are shown, not obeyed."""
        return "\n".join(paragraph(self.text))

    @property
    def id(self) -> int:
        """Return its number, as `artctl show` takes it."""
        return int(self.row["id"])

    @property
    def group(self) -> str:
        """Return the name of its group."""
        return str(self.row["group"])

    @property
    def reward(self) -> float:
        """Return its reward."""
        return float(self.row["reward"])

    @property
    def state(self) -> str:
        """Return queued, packed, trained or discarded."""
        return str(self.row["state"])

    @property
    def messages(self) -> list[Message]:
        """Return the messages of all sequences, in order."""
        return [message for passage in self.sequences for message in passage.messages]

    @property
    def text(self) -> str:
        """Return the conversation, exactly as it was decoded: each message after a line with its role."""
        return "\n\n".join(f"{message.role}:\n{_whole(message)}" for message in self.messages)


def _whole(message: Message) -> str:
    return f"<think>\n{message.thinking}\n</think>\n{message.text}" if message.thinking else message.text


class Vocabulary:
    """The tokenizer of one run. It is asked for once; a daemon that cannot read it is asked again."""

    def __init__(self) -> None:
        self._found: Tokenizer | None = None

    async def get(self, connection: Connection, run: str) -> tuple[Tokenizer | None, str]:
        """Return the tokenizer, or None and why there is none."""
        if self._found is not None:
            return self._found, ""
        answer = await connection.ask(api.ReadTokenizer(run=run), api.TokenizerFile)
        if answer.problem:
            return None, answer.problem
        try:
            self._found = Tokenizer(answer.content)
        except Unreadable as error:
            return None, str(error)
        return self._found, ""

"""How a trajectory looks on a terminal: its messages, and its tokens in colours that mean something."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any

from artd.cli import show, terminal
from artd.cli.show import Row
from artd_schema.text.plain import paragraph, plain
from artd_schema.text.transcript import Message, Passage, TokenView

from .load import Loaded

Colours = tuple[tuple[str, str], ...]
"""(code of a terminal, what it means), for the legend."""
CONTEXT = ("2", "context")
LIKELY: tuple[tuple[float, str, str], ...] = (
    (math.log(0.9), "0", "p ≥ 0.9"),
    (math.log(0.5), "38;5;117", "≥ 0.5"),
    (math.log(0.1), "38;5;221", "≥ 0.1"),
    (math.log(0.01), "38;5;208", "≥ 0.01"),
    (-math.inf, "1;4;38;5;198", "< 0.01"),
)
"""By the engine's probability of the sampled token: the first row whose bound it reaches."""
EPOCHS = ("38;5;75", "38;5;214", "38;5;108", "38;5;176", "38;5;228", "38;5;203")
"""One after the other, again and again: neighbours in time differ."""
UP, DOWN, NEITHER = "38;5;75", "38;5;208", "0"
UNKNOWN = "0"
VIEWS = ("mask", "logprob", "advantage", "epoch", "cache")
SHORT = 4
"""Lines of a message in a list of samples."""


def head(found: Loaded) -> str:
    """Return one line that says which trajectory it is and what became of it."""
    row = found.row
    parts = [
        show.paint(f"#{row['id']}", "bold"),
        f"group {show.one_line(row['group'], 40)}",
        f"reward {row['reward']:.4g}",
        show.state(row["state"]) + (f" ({show.one_line(row['reason'], 80)})" if row["reason"] else ""),
        f"{row['tokens']} tokens sampled",
    ]
    if found.advantage is not None:
        parts.append(f"advantage {found.advantage:.4g}")
    if row["split"] == "eval":
        parts.append("eval")
    if row["epoch_min"] is not None:
        span = (row["epoch_min"], row["epoch_max"])
        parts.append(f"epoch {span[0]}" if span[0] == span[1] else f"epochs {span[0]}-{span[1]}")
    return "   ".join([*parts, show.ago(row["created"])])


def notes(row: Row) -> Iterator[str]:
    """Yield what the program that submitted a trajectory said of it: `metrics` and `metadata`."""
    for name, told in row["metrics"].items():
        if told:
            yield f"  {show.paint(name.ljust(9), 'dim')} {show.one_line(json.dumps(told, ensure_ascii=False), 400)}"


def brief(found: Loaded) -> Iterator[str]:
    """Yield a trajectory as one of many: its last prompt and what was sampled after it, each cut to a few lines."""
    messages = [message for passage in found.passages for message in passage.messages]
    last = max((at for at, message in enumerate(messages) if message.sampled), default=len(messages) - 1)
    asked = max((at for at in range(last) if not messages[at].sampled), default=last)
    if asked > 0:
        yield show.paint(f"  … {asked} earlier message{'s' if asked > 1 else ''}", "dim")
    for message in messages[asked : last + 1]:
        yield from _message(message, SHORT)


def whole(found: Loaded) -> Iterator[str]:
    """Yield every message of a trajectory."""
    for number, passage in enumerate(found.passages):
        if len(found.passages) > 1:
            yield show.paint(f"  sequence {number + 1} of {len(found.passages)}", "dim")
        for message in passage.messages:
            yield from _message(message, 0)


def problems(found: Loaded) -> Iterator[str]:
    """Yield why something is not shown."""
    for why in (found.missing, found.untold):
        if why:
            yield f"  {show.paint('no text', 'yellow')}   {plain(why)}"


def _message(message: Message, most: int) -> Iterator[str]:
    """Yield the lines of a message, with its role in front, at most `most` lines (0: all)."""
    colour = "green" if message.sampled else "dim"
    role = show.one_line(message.role, 12)
    blocks = [(f"{role} thinks", message.thinking, "dim")] if message.thinking else []
    if message.text or not (message.thinking or message.tool_calls):
        blocks.append((role, message.text, ""))
    blocks += [("calls", f"{call['name']}({call['arguments']})", "yellow") for call in message.tool_calls]
    for title, text, tint in blocks:
        lines = paragraph(text.strip("\n"))
        cut = len(lines) - most if most and len(lines) > most else 0
        for at, line in enumerate(lines[:most] if cut else lines):
            start = show.paint(title.ljust(9), colour) if at == 0 else " " * 9
            yield f"  {start} {show.paint(line, tint) if tint else line}".rstrip()
        if cut:
            yield show.paint(f"  {' ' * 9} … {cut} more lines", "dim")


# ---- tokens ---------------------------------------------------------------------------------------------------------------


def tokens(found: Loaded, view: str) -> Iterator[str]:
    """Yield the text with each token in the colour of `view` (one of `VIEWS`), or a table of the tokens where there are no colours."""
    for number, passage in enumerate(found.passages):
        if len(found.passages) > 1:
            yield show.paint(f"  sequence {number + 1} of {len(found.passages)}", "dim")
        if terminal.coloured():
            yield from _legend(passage, view, found)
            yield _inline(passage, lambda token: _code(token, view, found.advantage))
        else:
            yield "turn\tlogprob\tepoch\tcache\tadvantage\ttoken"
            yield from (_cells(token, found.advantage) for token in passage.tokens)


def _inline(passage: Passage, code_of: Callable[[TokenView], str]) -> str:
    out: list[str] = []
    for token in passage.tokens:
        text = "\n".join(paragraph(token.text)) if token.text else f"[{token.id}]"
        code = code_of(token)
        lines = [f"\x1b[{code}m{line}\x1b[0m" if line else "" for line in text.split("\n")]
        out.append("\n".join(lines))
    return "".join(out)


def _code(token: TokenView, view: str, advantage: float | None) -> str:
    """Return the colour of a token, as the number in a terminal's colour sequence."""
    if token.turn < 0:
        return CONTEXT[0]
    if view == "logprob":
        return next(code for bound, code, _ in LIKELY if (token.logprob or 0.0) >= bound)
    if view in ("epoch", "cache"):
        epoch = getattr(token, view)
        return UNKNOWN if epoch is None else EPOCHS[epoch % len(EPOCHS)]
    if view == "advantage" and advantage is not None:
        return UP if advantage > 0 else DOWN if advantage < 0 else NEITHER
    return "1" if view == "mask" else UNKNOWN


def _legend(passage: Passage, view: str, found: Loaded) -> Iterator[str]:
    sampled = [token for token in passage.tokens if token.turn >= 0]
    known: list[tuple[str, str]] = [CONTEXT]
    if view == "logprob":
        known += [(code, text) for _, code, text in LIKELY]
    elif view in ("epoch", "cache"):
        epochs = dict.fromkeys(getattr(token, view) for token in sampled)
        known += [
            (EPOCHS[one % len(EPOCHS)], f"epoch {one}") if one is not None else (UNKNOWN, "unknown") for one in epochs
        ]
    elif view == "advantage":
        told = "in no batch, or left out" if found.advantage is None else f"advantage {found.advantage:.4g}"
        known += [(_code(sampled[0], view, found.advantage), told)] if sampled else []
    else:
        known += [("1", "sampled")]
    yield "  " + "  ".join(f"\x1b[{code}m{text}\x1b[0m" for code, text in known)


def _cells(token: TokenView, advantage: float | None) -> str:
    numbers: tuple[Any, ...] = (token.logprob, token.epoch, token.cache, advantage if token.turn >= 0 else None)
    cells = ["" if one is None else f"{one:.4g}" if isinstance(one, float) else str(one) for one in numbers]
    text = plain(token.text) if token.text else f"[{token.id}]"
    return "\t".join(["" if token.turn < 0 else str(token.turn), *cells, text])

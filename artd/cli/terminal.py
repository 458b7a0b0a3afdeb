"""What the terminal shows: colours and width. `choose` takes what the command line says of them, before a verb runs."""

from __future__ import annotations

import os
import re
import shutil
import sys
from argparse import ArgumentParser
from dataclasses import dataclass

WHEN = ("auto", "always", "never")
_STEP = re.compile(r"\x1b\[[0-9;]*m|.", re.DOTALL)
"""A colour sequence of artd's own, or a character."""


@dataclass
class _Chosen:
    color: str = "auto"
    wide: bool = False


_chosen = _Chosen()


def choose(color: str, wide: bool) -> None:
    """Set when to colour (one of `WHEN`), and whether lines may be longer than the terminal is wide."""
    _chosen.color, _chosen.wide = color, wide


def wide_option(parser: ArgumentParser) -> None:
    """Add `--wide` to a verb whose lines are cut to the terminal."""
    parser.add_argument("--wide", action="store_true", help="do not cut lines to the width of the terminal")


def coloured() -> bool:
    """Return whether to print colours: `--color`, else on a terminal without NO_COLOR and TERM=dumb."""
    if _chosen.color != "auto":
        return _chosen.color == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def width() -> int:
    """Return the columns that a line may have, 0 for any number: the lines of a pipe and those of `--wide` are never cut."""
    return 0 if _chosen.wide or not sys.stdout.isatty() else shutil.get_terminal_size().columns


def cut(line: str, most: int) -> str:
    """Return a line cut to at most `most` columns (0: not cut). Colour sequences take no columns."""
    steps = _STEP.findall(line)
    seen = [step for step in steps if len(step) == 1]
    if not most or len(seen) <= most:
        return line
    out, left = [], most - 1
    for step in steps:
        if len(step) > 1:
            out.append(step)
        elif left > 0:
            out.append(step)
            left -= 1
    return "".join(out) + "…"


def fit(widths: list[int], least: list[int], most: int, gap: int = 2) -> list[int]:
    """Return widths of a table's columns that fit into `most` columns (0: any). The widest columns shrink first, none below its `least`;
    if that is not enough, the last columns are left out."""
    out = list(widths)
    while most and sum(out) + gap * (len(out) - 1) > most:
        wide = [at for at, width in enumerate(out) if width > least[at]]
        if wide:
            out[max(wide, key=out.__getitem__)] -= 1
        elif len(out) > 1:
            out = list(widths[: len(out) - 1])
        else:
            break
    return out

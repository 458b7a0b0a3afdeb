"""A picture that is drawn again and again, until Ctrl-C."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

from . import show, terminal

HOME = "\x1b[H"
REST_OF_LINE = "\x1b[K"
REST_OF_SCREEN = "\x1b[J"


def cut_lines(lines: Iterable[str]) -> Iterator[str]:
    """Cut lines to the width of the terminal."""
    most = terminal.width()
    return (terminal.cut(line, most) for line in lines)


def watch(draw: Callable[[], Iterable[str]], period_s: float) -> NoReturn:
    """Print what `draw` returns every `period_s` seconds: over itself on a terminal, else one picture after the other. Ends with KeyboardInterrupt."""
    over = sys.stdout.isatty()
    print("\x1b[2J" if over else "", end="")
    while True:
        drawn = list(cut_lines(draw()))
        picture = [
            *(drawn[: shutil.get_terminal_size().lines - 2] if over else drawn),
            show.paint(f"every {period_s:g} s, Ctrl-C ends", "dim"),
        ]
        if over:
            print(HOME + "".join(f"{line}{REST_OF_LINE}\n" for line in picture) + REST_OF_SCREEN, end="", flush=True)
        else:
            print("\n".join(picture), end="\n\n", flush=True)
        time.sleep(period_s)

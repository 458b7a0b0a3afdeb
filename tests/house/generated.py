"""What the modules that write a generated file share: their command line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path


def main(page: Path, render: Callable[[], str], arguments: list[str]) -> int:
    """Print what `render` gives, or write it to `page` with `--write`. Returns the exit status."""
    if arguments not in ([], ["--write"]):
        print(f"error: unknown arguments {arguments}; use --write, or none to print {page.name}", file=sys.stderr)
        return 2
    if arguments:
        page.write_text(render())
    else:
        print(render(), end="")
    return 0

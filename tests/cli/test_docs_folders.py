"""The folder tables of docs/architecture.md: every package folder with the first line of its `__init__.py`, and nothing else."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()


@pytest.mark.parametrize("root", ["artd", "workers/artd_workers"])
def test_the_map_has_every_folder(root: str) -> None:
    table = TEXT.partition(f"| folder of `{root}/` |")[2].partition("\n\n")[0]
    told = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", table, re.M))
    there = {
        str(path.parent.relative_to(ROOT / root)): _first_line(path)
        for path in (ROOT / root).rglob("__init__.py")
        if path.parent != ROOT / root
    }
    assert told == there


def test_no_folder_is_crowded() -> None:
    """Sixteen files are what a reader takes in at a glance; a folder above that wants a shelf."""
    folders = [path.parent for root in ("artd", "workers/artd_workers") for path in (ROOT / root).rglob("__init__.py")]
    crowded = {str(f.relative_to(ROOT)): n for f in folders if (n := len(list(f.glob("*.py"))) - 1) > 16}
    assert len(folders) > 40
    assert not crowded


def _first_line(path: Path) -> str:
    doc = ast.get_docstring(ast.parse(path.read_text())) or ""
    paragraph = re.split(r"\n\n|\n(?=Owner|Purpose)", doc)[0]
    return " ".join(paragraph.split()).rstrip(".")

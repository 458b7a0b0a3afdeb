"""Files that docs/architecture.md names by their folder and a short name."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/architecture.md").read_text()
TRAINER = ROOT / "workers/artd_workers/trainer"


def test_files_in_parentheses_are_in_the_folder_before_them() -> None:
    """`FOLDER/` (`a.py`, `b.py`)."""
    found = re.findall(r"`([\w/]+/)` \(([^)\[]*)\)", TEXT)
    named = [(folder, name) for folder, names in found for name in re.findall(r"`(\w+\.py)`", names)]
    assert len(named) > 15
    assert not [f"{folder}{name}" for folder, name in named if not (ROOT / folder / name).is_file()]


def test_the_trainers_table_has_every_file_of_its_folder() -> None:
    section = TEXT.partition("### The trainer\n")[2].partition("\n#")[0]
    told = re.findall(r"`(\w+\.py)`", section)
    there = {path.name for path in TRAINER.glob("*.py") if not path.name.startswith("__")}
    assert sorted(told) == sorted(set(told))
    assert set(told) == there, set(told) ^ there

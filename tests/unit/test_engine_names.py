"""An engine is one folder and one entry: nothing else names it."""

from __future__ import annotations

import re
from pathlib import Path

from artd_schema.run.engines import ENGINES

ROOT = Path(__file__).parents[2]
FOLDERS = ("artd", "schema/artd_schema", "workers/artd_workers", "client/artd_client")
ENTRY = "schema/artd_schema/run/engines.py"


def test_no_file_outside_its_folder_names_an_engine() -> None:
    found: dict[str, int] = {}
    names = re.compile("|".join(map(re.escape, ENGINES)), re.IGNORECASE)
    for path in (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        own = any(name.startswith(f"workers/artd_workers/engines/{kind}/") for kind in ENGINES)
        if (
            name != ENTRY
            and not own
            and (lines := sum(bool(names.search(line)) for line in path.read_text().splitlines()))
        ):
            found[name] = lines
    assert found == {}

"""The soak's table, the drawing of cells, and a short soak."""

from __future__ import annotations

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tests.daemon.rig import ROOT
from tests.soak import table
from tests.soak.cells import KILLS, PAUSES, Cell, Draw, cells
from tests.soak.table import Hit, Verdict


def hits(cell: Cell, action: str, count: int, **changes) -> list[Hit]:
    made = Hit(process=cell.process, phase=cell.phase, action=action, point="p", workers="fake", **changes)
    return [made] * count


def full() -> list[table.Line]:
    lines: list[table.Line] = [hit for cell in cells() for hit in hits(cell, "kill", KILLS, ready_s=1.0)]
    return lines + [hit for cell in cells() for hit in hits(cell, "pause", PAUSES)]


def verdict(**found: int) -> Verdict:
    return Verdict(seed=1, workers="fake", seconds=1.0, steps=2, acked=3, replies=4, helped=0, found=found, what=("x",))


def test_a_table_of_several_files(tmp_path: Path):
    for name, lines in (("a", full()), ("b", [verdict(), *hits(Cell("packer", "pack"), "kill", 1)])):
        (tmp_path / name).write_bytes(b"\n".join(map(msgspec.json.encode, lines)))
    lines = table.read([tmp_path / "a", tmp_path / "b", tmp_path / "none"])
    told = table.document(lines)
    assert told["short"] == [] and told["cells"]["packer/pack"] == {"kills": KILLS + 1, "pauses": PAUSES}  # type: ignore[index]
    assert told["kills"] == {"fake": KILLS * len(cells()) + 1, "real": 0}
    assert told["recovery"]["fake engine ready"] == {"n": 45, "median": 1.0, "p95": 1.0}  # type: ignore[index]
    assert "5/2" in table.text(lines) and "6/2" in table.text(lines)


def test_short_cells_and_violations_are_told():
    lines = [*full()[1:], verdict(lost=2)]
    assert table.short(lines) == [cells()[0]]
    assert table.violations(lines) == {"lost": 2}
    assert "lost 2" in table.text(lines) and "short of hits: 1 of" in table.text(lines)


def test_short_cells_are_drawn_first():
    done = table.counts(full())
    del done[Cell("engine", "stage"), "pause"]
    draw = Draw(random.Random(1), done)
    drawn = Counter(draw.draw(recovering=False) for _ in range(200))
    assert drawn.most_common(1)[0][0] == (Cell("engine", "stage"), "pause")
    assert all(cell.phase == "recover" for cell, _ in (draw.draw(recovering=True) for _ in range(50)))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("replicas", ["1", "2"])
def test_a_short_soak_breaks_nothing(tmp_path: Path, replicas: str):
    command = [sys.executable, "-m", "tests.soak", "--kills", "12", "--seed", "7", "--replicas", replicas]
    command += ["--hits", str(tmp_path / "hits")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stdout
    lines = table.read([tmp_path / "hits"])
    assert sum(isinstance(line, Hit) and line.action == "kill" for line in lines) >= 12

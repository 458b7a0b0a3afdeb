"""The list of crash points is true: each name stands once in the code of its process, and some test dies there."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from artd_schema.crashpoint import POINTS
from tests.crash.test_points import CHAINS
from tests.soak.cells import PHASES

ROOT = Path(__file__).parents[2]
REACH = re.compile(r'\breach\(\s*"([^"]+)"\s*\)')
HOME = {  # the first that fits
    "artd/packing/child.py": "packer",
    "artd/": "daemon",
    "client/": "client",
    "workers/artd_workers/trainer/": "trainer",
    "workers/artd_workers/engines/": "engine",
    "workers/artd_workers/gateway/": "gateway",
}
ELSEWHERE: dict[str, str] = {
    "migrate.backed_up": "tests/unit/test_migrate.py",
    "migrate.done": "tests/unit/test_migrate.py",
}
"""Points that no chain has, and the test that dies there or sees them reached."""
FAKED = {
    "train.accepted": "tests/trainer/test_worker.py",
    "train.stepped": "tests/trainer/test_worker.py",
    "train.committed": "tests/trainer/test_worker.py",
    "engine.started": "tests/engine/test_harness.py",
    "engine.fenced": "tests/engine/test_harness.py",
    "engine.pausing": "tests/engine/test_harness.py",
    "engine.paused": "tests/engine/test_harness.py",
    "engine.updated": "tests/engine/test_harness.py",
    "engine.resumed": "tests/engine/test_harness.py",
    "engine.verified": "tests/engine/test_harness.py",
}
"""Points that a fake reaches in the place of the real worker, and the test that sees the real one reach them."""
NEVER_UNDER_LOAD = frozenset({
    "run.created", "schema.created", "wal.checkpoint", "stop.drained", "job.failed", "retain.retired", "gc.trashed",
    "gc.unlinked", "migrate.backed_up", "migrate.done",
})  # fmt: skip
"""Points that the load of a soak does not reach, or not often enough to wait for."""


def in_code(*folders: str) -> dict[str, list[str]]:
    """Point -> files that reach it."""
    found: dict[str, list[str]] = defaultdict(list)
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for name in REACH.findall(path.read_text()):
                found[name].append(str(path.relative_to(ROOT)))
    return found


def test_every_point_of_the_code_is_listed_and_lies_where_its_process_runs():
    found = in_code("artd", "client", "schema", "workers")
    assert set(found) == set(POINTS)
    homes = {
        name: {next(kind for prefix, kind in HOME.items() if path.startswith(prefix)) for path in paths}
        for name, paths in found.items()
    }
    assert homes == {name: {process} for name, process in POINTS.items()}


def test_every_point_is_died_at():
    chained = [point for lives in CHAINS.values() for points in lives for point in points]
    assert len(chained) == len(set(chained)), "a point is killed at once"
    assert set(chained) | set(ELSEWHERE) == set(POINTS) and not set(chained) & set(ELSEWHERE)
    assert all(f'"{name}"' in (ROOT / path).read_text() for name, path in (ELSEWHERE | FAKED).items())


def test_what_a_fake_reaches_the_real_worker_is_seen_to_reach():
    faked = {name for name in in_code("tests/fakes") if name in POINTS}
    assert faked == set(FAKED)


def test_a_soak_knows_the_phase_of_every_point():
    phased = [point for points in PHASES.values() for point in points]
    assert len(phased) == len(set(phased)) and set(phased) | NEVER_UNDER_LOAD == set(POINTS)

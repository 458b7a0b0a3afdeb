"""Where a batch is shown, so is how many of its tokens have the routes of their experts."""

from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Call
from tests.cli.rows import Made


@pytest.fixture
def replayed(made: Made) -> Made:
    """The batch of job 3 (step 2) has a replay bundle; that of job 4 has none."""
    (sha,) = made.connection.execute("SELECT tensors FROM batch WHERE step = 2").fetchone()
    made.connection.execute("UPDATE batch SET replay = ?, replay_manifest = ?, covered = 92 WHERE step = 2", (sha, sha))
    return made


def test_jobs_show_coverage_only_where_experts_are_replayed(replayed: Made, artctl: Call) -> None:
    _, out, _ = artctl("jobs")
    heading, *rows = [line.split() for line in out.splitlines()]
    assert "replay" in heading and [row for row in rows if "92.0%" in row] == [row for row in rows if row[0] == "3"]
    found = {row["id"]: row["batch_covered"] for row in json.loads(artctl("jobs", "--json")[1])["jobs"]}
    assert found == {1: None, 2: None, 3: 92, 4: None}


def test_a_dense_run_has_no_such_column(made: Made, artctl: Call) -> None:
    assert "replay" not in artctl("jobs")[1]


def test_a_job_tells_its_batch_and_coverage(replayed: Made, artctl: Call) -> None:
    assert "  batch     1   100 tokens, 92 with the routes of their experts\n" in artctl("job", "3")[1]
    assert "  batch     2   100 tokens\n" in artctl("job", "4")[1]
    assert "  batch" not in artctl("job", "2")[1]


def test_the_database_keeps_a_bundle_whole(made: Made) -> None:
    (sha,) = made.connection.execute("SELECT tensors FROM batch WHERE step = 2").fetchone()
    for columns in ("replay = :sha", "covered = 92", "replay = :sha, replay_manifest = :sha"):
        with pytest.raises(Exception, match="CHECK constraint failed"):
            made.connection.execute(
                f"UPDATE batch SET {columns} WHERE step = 2", {"sha": sha} if ":" in columns else {}
            )

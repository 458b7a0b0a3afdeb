"""A trajectory's state changes; its body is not written again with it."""

from __future__ import annotations

import pytest

from tests.fakes.rows import add_run, data_dir, make_ingest, one, open_store, submit, turn
from tests.fakes.steps import commit_next, pack

pytestmark = pytest.mark.asyncio
BODY = 60_000


async def test_packing_and_training_write_no_body_again(tmp_path):
    async with open_store(tmp_path) as store:
        data = data_dir(tmp_path)
        await add_run(store, group_size=16, row_length=1024)
        await commit_next(store, data)
        ingest = make_ingest(store, data)
        for number in range(16):
            await submit(ingest, key=f"k{number}", reward=float(number), turns=(turn(raw=bytes([number]) * BODY),))
        log = tmp_path / "artd.db-wal"
        before = log.stat().st_size
        assert before > 16 * BODY, "the bodies are in their rows"
        assert await pack(store, data)
        await commit_next(store, data)
        assert await one(store, "SELECT count(*) FROM trajectory WHERE state = 'trained'") == 16
        # Pages of narrow rows and their indices; one rewriting of the bodies would be 16.
        assert log.stat().st_size - before < 8 * BODY

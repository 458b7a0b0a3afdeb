"""What the end-to-end tests share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.rig import Rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A started daemon on an empty data folder; ended with the test, however it ends."""
    made = Rig(tmp_path / "data")
    made.start()
    try:
        yield made
    finally:
        with contextlib.suppress(AssertionError):
            made.stop()

"""What several tests of the client share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_daemon import ClientDaemon


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[ClientDaemon]:
    with ClientDaemon(tmp_path / "data") as fake:
        yield fake

"""Free space: below the limit nothing is admitted, and it heals by itself."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from artd.disk import Disk
from artd.errors import Busy
from tests.fakes.rows import FakeClock


def test_admission_stops_below_the_limit_and_goes_on_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = SimpleNamespace(f_bavail=10, f_frsize=1 << 20)
    monkeypatch.setattr(os, "statvfs", lambda path: free)
    clock = FakeClock()
    disk = Disk(tmp_path, 11 << 20, clock)
    with pytest.raises(Busy, match="only 10 MiB are free") as error:
        disk.require()
    assert error.value.retry_after_s > 0
    free.f_bavail = 11
    with pytest.raises(Busy):
        disk.require()  # read at most once a second
    clock.advance(1.0)
    disk.require()

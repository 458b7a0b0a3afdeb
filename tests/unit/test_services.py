"""What the daemon's services do by themselves, without anybody asking."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from artd.config import Limits, Runtimes, Settings
from artd.datadir import log_files
from artd.retention import collector
from artd.services import Services
from artd.store.blobs import TRASH
from artd.workforce import Boot
from artd_schema.codec import digest
from tests.awake import SOON_S
from tests.fakes.rows import FakeWire, data_dir, open_store

pytestmark = pytest.mark.asyncio
MIB = 1 << 20


async def test_files_without_rows_go_and_large_logs_begin_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (collector, log_files):
        monkeypatch.setattr(module, "PERIOD_S", 0.05)
    monkeypatch.setattr(collector, "FIRST_S", 0.05)
    data = data_dir(tmp_path)
    loose = data.blobs / digest(b"loose")[:2] / digest(b"loose")
    loose.parent.mkdir(parents=True)
    loose.write_bytes(b"loose")
    os.utime(loose, (1.0, 1.0))  # of an older boot
    log = data.log("trainer")
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_bytes(bytes(MIB + 1))
    settings = Settings(limits=Limits(min_free_mib=1, reserve_mib=0, log_mib=1), runtimes=Runtimes())
    boot = Boot(instance="i" * 32, number=1, code=tmp_path, endpoint="", token="t")
    async with open_store(tmp_path) as store, anyio.create_task_group() as group:
        services = Services(store, FakeWire(), data, settings, boot, lambda *_: None, lambda _: None, lambda _: None)
        monkeypatch.setattr(services.workforce, "run", anyio.sleep_forever)
        services.workforce.supervisor = SimpleNamespace(names=lambda: ())
        services.start(group)
        with anyio.move_on_after(SOON_S / 4):
            while loose.exists() or list((data.blobs / TRASH).glob("*")) or log.stat().st_size:
                await anyio.sleep(0.01)
        group.cancel_scope.cancel()
    assert not loose.exists() and not list((data.blobs / TRASH).glob("*")), "nobody collects"
    assert log.stat().st_size == 0, "the log goes on"
    assert log.with_name("trainer.log.1").stat().st_size == MIB + 1

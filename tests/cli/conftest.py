"""Fixtures of the command-line tests: a frozen time, a data folder, a daemon that is one lock and one file. Nothing of the
user's own folders or settings is read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from artd.cli import ctl, show
from artd.cli.status import snapshot
from artd.datadir import lock
from artd_schema import paths
from tests.cli.rows import T0, Made, busy

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("ARTD_DATA_DIR", "ARTD_CONFIG", "ARTD_LOG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "share"))
    monkeypatch.setenv("TZ", "UTC")


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(show, "now_ms", lambda: T0)
    monkeypatch.setattr(snapshot.os, "statvfs", lambda _: SimpleNamespace(f_bavail=100 << 20, f_frsize=1 << 12))


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def made(data: Path, frozen: None) -> Made:
    return busy(data)


@dataclasses.dataclass
class FakeDaemon:
    """This process as a daemon of `data`: holds the lock, says what it is told to say."""

    data: Path

    def __post_init__(self) -> None:
        self.data.mkdir(parents=True, exist_ok=True)
        self.handle = lock.acquire(self.data, "9.9.9", 60.0)
        self.file = lock.describe("9.9.9", 60.0)
        self.tell("ready", url="http://127.0.0.1:4000", started=T0 - 3_840_000)

    def tell(self, state: str, **changes: object) -> None:
        self.file = dataclasses.replace(self.file, state=state, **changes)
        paths.write_daemon_file(self.data, self.file)

    def die(self) -> None:
        self.handle.close()


@pytest.fixture
def daemon(data: Path) -> Iterator[FakeDaemon]:
    fake = FakeDaemon(data)
    yield fake
    fake.die()


@pytest.fixture
def artctl(data: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call artctl on `data` in this process: (exit code, stdout, stderr)."""

    def call(*words: str) -> tuple[int, str, str]:
        try:
            code = ctl.main([*words, "--data-dir", str(data)])
        except SystemExit as ended:  # argparse's way out
            code = int(ended.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return call

"""Decides what may be skipped, and runs tests that mount without being root.

`tests/SKIPS` names every test that may be skipped, and what it needs. Any other skip fails the run, because a test that nobody
runs guards nothing. With ARTD_SKIP_NONE set (`make root`) no skip is allowed. Tests marked `mounts` run directly where this
account may mount, else in a user namespace of their own (`unshare -rm`), else they are skipped.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "SKIPS"
INSIDE = "ARTD_TESTS_MAY_MOUNT"
NONE = "ARTD_SKIP_NONE"
NAMESPACE = ("unshare", "--map-root-user", "--mount")


def listed() -> dict[str, str]:
    """Test without its parameters -> what it needs."""
    rows = (line.split() for line in LISTED.read_text().splitlines() if line and not line.startswith("#"))
    return {test: need for need, test in rows}


def forbidden(test: str) -> bool:
    """Whether the skip of a test (its node id) turns the run red."""
    return bool(os.environ.get(NONE)) or test.partition("[")[0] not in listed()


class Skips:
    """Hooks: remembers forbidden skips, and ends the session with 1 for them."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: Any) -> None:
        self._take(report)

    def pytest_collectreport(self, report: Any) -> None:
        self._take(report)

    def _take(self, report: Any) -> None:
        if report.skipped and not hasattr(report, "wasxfail") and forbidden(report.nodeid):
            why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.found.append((report.nodeid, why))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.found and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        for test, why in self.found:
            terminalreporter.write_line(f"SKIPPED, and tests/SKIPS does not allow it: {test} ({why})", red=True)


@functools.cache
def _namespaces() -> bool:
    """Whether this account may make a user namespace and mount in it."""
    try:
        tried = subprocess.run([*NAMESPACE, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False)
    except OSError:
        return False
    return tried.returncode == 0


def may_mount() -> bool:
    return os.geteuid() == 0 or INSIDE in os.environ


class InNamespace(pytest.Item):
    """A test in a pytest of its own, in a user namespace in which it may mount. original: the item that it stands for."""

    def __init__(self, *, original: pytest.Item, **more: Any) -> None:
        super().__init__(**more)
        self.original = original
        self.own_markers.extend(original.iter_markers())

    def runtest(self) -> None:
        if not _namespaces():
            pytest.skip("may neither mount nor make a user namespace here")
        command = [*NAMESPACE, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", self.nodeid]
        with tempfile.TemporaryDirectory(
            prefix="artd-x"
        ) as runtime:  # the real root's folders are a stranger's in there
            inside = os.environ | {INSIDE: "1", "XDG_RUNTIME_DIR": runtime}
            done = subprocess.run(command, cwd=ROOT, env=inside, capture_output=True, text=True, check=False)
        if done.returncode or " passed" not in done.stdout:
            pytest.fail(f"in a user namespace:\n{done.stdout}{done.stderr}", pytrace=False)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        path, line, name = self.original.reportinfo()
        return Path(path), line, name


def in_namespaces(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """The items, those that mount in a namespace of their own where they have to be."""
    for item in items:
        if item.get_closest_marker("mounts") and not may_mount():
            assert item.parent is not None
            yield InNamespace.from_parent(item.parent, name=item.name, original=item)
        else:
            yield item

"""tests/SKIPS: it names tests that exist, and every other skip is red."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import skips

CONFTEST = "from tests.conftest import pytest_collection_modifyitems, pytest_configure\n"


def outcome(folder: Path, text: str) -> tuple[int, str]:
    """Exit code and output of a pytest of its own, without plugins, over one file."""
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(f"import pytest\n{text}")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    command += ["-c", str(folder / "pytest.ini")]
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = mounts\n")
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(skips.ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_the_list_names_tests_of_this_tree() -> None:
    for test, need in skips.listed().items():
        file, _, name = test.partition("::")
        assert re.search(rf"^(async )?def {name}\(", (skips.ROOT / file).read_text(), re.M), test
        assert need in ("root", "mounts"), test


def test_a_skip_outside_the_list_is_red(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "def test_a(): pytest.skip('no wish')\ndef test_b(): pass\n")
    assert code == 1 and "tests/SKIPS does not allow it: test_it.py::test_a (Skipped: no wish)" in said, said


def test_a_file_that_skips_itself_is_red(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "pytest.importorskip('no_such_module')\n")
    assert code != 0 and "tests/SKIPS does not allow it: test_it.py" in said, said


def test_a_listed_skip_is_red_only_where_none_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(skips.NONE, raising=False)
    test = next(iter(skips.listed()))
    assert not skips.forbidden(test) and not skips.forbidden(f"{test}[a-b]") and skips.forbidden(f"{test}_more")
    monkeypatch.setenv(skips.NONE, "1")
    assert skips.forbidden(test)


def test_an_expected_failure_is_no_skip(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "@pytest.mark.xfail\ndef test_a(): assert False\n")
    assert code == 0, said

"""Out of the box elsewhere: the wheel, installed outside any checkout, has a working doctor, runtime list and start."""

from __future__ import annotations

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a clone of what is committed, so that nothing untracked gets in."""
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "-q", "-w", folder, folder / "clone"]
    subprocess.run(command, check=True)
    (found,) = folder.glob("artd-*.whl")
    return found


def test_it_holds_locks_sql_and_worker_code_and_names_no_torch(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
    for needed in (
        "artd/runtimes/locks/megatron-cpu-py311.txt", "artd/runtimes/locks/vllm-cpu-py311.txt",
        "artd_schema/sql/0001_initial.sql", "artd_workers/trainer/step/step.py", "artd/supervise/guardian.py",
        "artd/py.typed", "artd/cli/dashboard/static/app.js", "artd/cli/dashboard/static/index.html", "artd_client/py.typed", "artd_schema/py.typed",
    ):  # fmt: skip
        assert needed in names
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist:")]
    assert required and not any(word in line for line in required for word in ("torch", "vllm", "megatron"))


def test_it_works_outside_a_checkout(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    bin_dir = tmp_path / "venv" / "bin"
    subprocess.run([bin_dir / "pip", "install", "-q", wheel], check=True)

    def run(*argv: str) -> str:
        done = subprocess.run([bin_dir / argv[0], *argv[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    data = str(tmp_path / "data")
    assert json.loads(run("artd", "doctor", "--json"))["ok"] is True
    assert "megatron" in run("artd", "runtime", "list")
    run("artd", "start", "--detach", "--data-dir", data)
    try:
        assert json.loads(run("artctl", "status", "--json", "--data-dir", data))["schema"] == "artctl.status/1"
    finally:
        run("artd", "stop", "--drain", "0", "--data-dir", data)

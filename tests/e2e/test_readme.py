"""README's first program, word for word: its shell block and its Python block are read out of it and run, on a home of its own."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from artd.runtimes import paths

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.timeout(1800)]


def blocks() -> tuple[str, str]:
    """(shell, Python) of the section "Use it"."""
    section = (ROOT / "README.md").read_text().partition("\n## Use it\n")[2].partition("\n## ")[0]
    (shell,) = re.findall(r"^```\n(.*?)^```$", section, re.M | re.S)
    (program,) = re.findall(r"^```python\n(.*?)^```$", section, re.M | re.S)
    return shell, program


def test_the_first_program_works_and_its_numbers_rise(tmp_path: Path) -> None:
    shell, program = blocks()
    home, clone = tmp_path / "home", tmp_path / "clone"
    runtimes = home / ".local" / "share" / "artd" / "runtimes"
    runtimes.parent.mkdir(parents=True)
    runtimes.symlink_to(paths.runtimes_root())  # of the whole, what `make runtimes` does alone
    subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
    (tmp_path / "first.py").write_text(program)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "python3").symlink_to(getattr(sys, "_base_executable", sys.executable))
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("XDG_", "ARTD_", "VIRTUAL_ENV", "PYTHON"))
    }
    configured = Path.home() / ".config" / "pip" / "pip.conf"
    pip = {"PIP_CONFIG_FILE": str(configured)} if configured.is_file() else {}
    environment = pip | kept | {"HOME": str(home), "PATH": f"{bin_dir}:{os.environ['PATH']}"}
    script = f"set -euo pipefail\ncd {clone}\n{shell}\ncd {tmp_path}\npython first.py\n"
    try:
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    finally:
        artd = home / "artd-env" / "bin" / "artd"
        if artd.exists():
            subprocess.run([artd, "stop", "--drain", "0"], env=environment, check=False, capture_output=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    rewards = [float(value) for value in re.findall(r"^\d+ (0\.\d+|1\.0)$", done.stdout, re.M)]
    assert len(rewards) == 10, done.stdout
    assert statistics.fmean(rewards[-3:]) > 1.5 * statistics.fmean(rewards[:3]), rewards
    assert re.search(r"artd: engine starting, \d+ s", done.stderr), done.stderr

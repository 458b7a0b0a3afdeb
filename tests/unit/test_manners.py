"""What a newcomer meets first is true: hooks run what `make check` runs, `make help` lists every target, pages name what exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def recipe(target: str) -> list[str]:
    """Return the commands of a target of the Makefile, as they run in the root of the checkout."""
    (lines,) = re.findall(rf"^{target}:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.M)
    return [line.strip().lstrip("@").replace("$(BIN)", ".venv/bin") for line in lines.splitlines()]


def test_the_hooks_run_what_make_check_runs() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"^ +entry: (.+)$", text, re.M) == recipe("check")
    assert re.findall(r"repo: (\S+)", text) == ["local"]


def test_make_help_names_every_target_in_a_short_line() -> None:
    text = (ROOT / "Makefile").read_text()
    (targets,) = re.findall(r"^\.PHONY: (.+)$", text, re.M)
    done = subprocess.run(["make", "-s", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True)
    told = re.findall(r"^  make ([a-z-]+) +\S", done.stdout, re.M)
    assert sorted(told) == sorted(targets.split()) and len(told) == len(set(told))
    assert all(len(line) <= 120 for line in done.stdout.splitlines())


PAGES = ["CONTRIBUTING.md", *(str(path.relative_to(ROOT)) for path in (ROOT / ".github").rglob("*.md"))]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_files_targets_and_links_that_exist(name: str) -> None:
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", text):
        assert ((ROOT / name).parent / target).exists(), target
    for path in re.findall(r"`((?:artd|workers|schema|client|tests|examples|docs|\.ci|\.github)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert set(re.findall(r"`make ([a-z-]+)", text)) <= targets

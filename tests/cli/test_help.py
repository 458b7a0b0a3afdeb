"""`--help` of every verb: what it is for, and a word on everything that it takes."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import artd
from artd.cli import ctl, main
from artd.cli.verbs import find_verbs


def verbs(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parser and, below it, one for each verb."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for each in action.choices.values():
                yield from verbs(each)


def parsers(command: str) -> list[argparse.ArgumentParser]:
    """The parser of a command and those of its verbs."""
    return list(verbs({"artd": main, "artctl": ctl}[command].parser()))


@pytest.mark.parametrize("parser", parsers("artd") + parsers("artctl"), ids=lambda parser: parser.prog)
def test_everything_is_explained(parser: argparse.ArgumentParser) -> None:
    assert parser.description and parser.description[0].isupper()
    takes = [action for action in parser._actions if not isinstance(action, argparse._SubParsersAction)]
    assert not [action.dest for action in takes if not action.help]
    assert parser.format_help()


@pytest.mark.parametrize("command", ["artd", "artctl"])
def test_a_verb_is_found_by_its_file_alone(command: str) -> None:
    """What is read from the names and texts of the files is what their modules register."""
    registered = {each.prog.split()[1] for each in parsers(command)[1:]}
    assert registered == set(find_verbs(command)) and len(registered) > 9


def test_a_file_makes_a_verb(tmp_path: Path) -> None:
    """A copy of the package with one more file has one more verb; another verb does not import it."""
    package = Path(str(artd.__file__)).parent
    shutil.copytree(package, tmp_path / "artd", ignore=shutil.ignore_patterns("__pycache__", "locks"))
    (tmp_path / "artd/cli/artctl/how_long.py").write_text(
        "def register(sub):\n    sub.add_parser('how-long', help='x').set_defaults(run=lambda args: print('an hour') or 0)\n"
    )
    shown = "import sys; from artd.cli import ctl; ctl.main([sys.argv[1]]); print(any('how_long' in name for name in sys.modules))"
    env = os.environ | {"PYTHONPATH": str(tmp_path), "ARTD_DATA_DIR": str(tmp_path / "data")}
    for verb, told in (("how-long", "an hour\nTrue\n"), ("status", "False\n")):
        done = subprocess.run(
            [sys.executable, "-c", shown, verb], env=env, cwd=tmp_path, capture_output=True, text=True
        )
        assert done.stdout.endswith(told), done.stderr

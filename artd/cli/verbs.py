"""Finds the verbs of a command by their files: those in `artd/cli/artctl/` and `artd/cli/artd/`.

The file `replay_job.py` holds the verb `replay-job`. A file with several verbs names them in a literal, `VERBS = (...)`.
`find_verbs` reads that literal from the file's text, because imports take most of the time of a short command. `register(sub)`
of the module adds the parsers.
"""

from __future__ import annotations

import ast
import importlib
import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Sequence
from functools import cache
from pathlib import Path

_FAMILY = re.compile(r"^VERBS = (\(.*?\))$", re.MULTILINE | re.DOTALL)
_WITH_VALUE = ("--data-dir", "--config", "--color")
COMMANDS = ("artd", "artctl")
"""Names of the one program. Each runs the verbs of both; its --help lists those of its own folder."""
STEERING = frozenset(
    {"cancel", "discard", "discard-group", "retry", "pause", "resume", "set", "finish", "delete", "rollback"}
)
NEVER_PROPOSED = STEERING | {"stop", "restore", "gc"}
"""Verbs that change or end something: a word that was mistyped proposes none of them."""
MEANT = {
    "ps": "workers",
    "watch": "status --watch",
    "trajectory": "show",
    "describe": "job",
    "plot": "metrics",
    "tail": "logs -f",
}
"""Word of other programs -> the verb that does it here."""


@cache
def find_verbs(command: str) -> dict[str, str]:
    """Map each verb of `artctl` or `artd`, in alphabetical order, to the name of the module that registers it."""
    found: dict[str, str] = {}
    for path in Path(__file__).with_name(command).glob("*.py"):
        if path.stem != "__init__":
            family = _FAMILY.search(path.read_text("utf-8"))
            names = ast.literal_eval(family[1]) if family else (path.stem.replace("_", "-"),)
            found |= dict.fromkeys(names, f"artd.cli.{command}.{path.stem}")
    return dict(sorted(found.items()))


def all_verbs() -> dict[str, str]:
    """Map each verb of both folders to the name of its module."""
    return {verb: module for command in COMMANDS for verb, module in find_verbs(command).items()}


def register_verbs(sub: _SubParsersAction[ArgumentParser], command: str, verb: str = "") -> None:
    """Add the parsers of one verb's module to `sub`, or those of all verbs if `verb` is empty, which imports every module."""
    verbs = find_verbs(command) if not verb else all_verbs()
    for module in [verbs[verb]] if verb else dict.fromkeys(verbs.values()):
        importlib.import_module(module).register(sub)


def chosen_verb(words: Sequence[str]) -> str:
    """Return the first word that is neither an option nor its value, or "" when it is not a verb."""
    rest = iter(words)
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return word if word in all_verbs() else ""
    return ""

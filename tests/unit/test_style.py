"""The ratchet of docs/style.md: no rule is broken more often than its number says, and no number is too high."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.house import style

# For each rule: a file of the daemon that breaks it once, and one that does not.
EXAMPLES = {
    "headers": ('"""X.\n\nOwner of: the lock. Errors: Conflict."""\n', '"""X.\n\nOwns the lock. Raises Conflict."""\n'),
    "fragments_with_of": (
        'def f() -> int:\n    """Of a row."""\n    return 1\n',
        'def f() -> int:\n    """Offer a row."""\n    return 1\n',
    ),
    "together_for_collective": (
        'def f() -> int:\n    """Sum of all, together."""\n    return 1\n',
        'def f() -> int:\n    """Keep what belongs together in one file."""\n    return 1\n',
    ),
    "participles_for_verbs": (
        "class A:\n    def _told(self) -> int:\n        return 1\n",
        "class A:\n    @property\n    def told(self) -> int:\n        return 1\n\n    def held(self) -> bool:\n        return True\n\n"
        "    def feed(self) -> int:\n        return 1\n",
    ),
    "imports_of_parents": ("from ..core import decide\n", "from .beside import y\nfrom artd.core import decide\n"),
    "absolute_imports_of_siblings": ("from artd.deep.beside import y\n", "from artd.deep.under.inner import y\n"),
    "long_files": ("x = 1\n" * 401, "x = 1\n" * 400),
}  # fmt: skip


@pytest.mark.parametrize("rule", style.read_ratchet())
def test_a_rule_is_broken_as_often_as_the_ratchet_says(rule: str) -> None:
    wrong = style.judge(rule, style.count_all()[rule], style.read_ratchet()[rule])
    assert not wrong, wrong


def test_every_rule_has_a_number_and_an_example() -> None:
    assert list(style.read_ratchet()) == [*style.RULES]
    assert {*EXAMPLES, "crowded_folders", "undocumented_client_names"} == set(style.read_ratchet())


def count(root: Path, rule: str) -> int:
    return len(style.count_all(root)[rule])


@pytest.mark.parametrize("rule", EXAMPLES)
def test_a_rule_finds_what_breaks_it_and_nothing_else(rule: str, tmp_path: Path) -> None:
    for name, text in zip(("bad", "good"), EXAMPLES[rule], strict=True):
        folder = tmp_path / name / "artd" / "deep"
        folder.mkdir(parents=True)
        (folder / "beside.py").write_text("y = 1\n")
        (folder / "it.py").write_text(text)
    assert (count(tmp_path / "bad", rule), count(tmp_path / "good", rule)) == (1, 0)


def test_a_folder_of_sixteen_modules_is_crowded(tmp_path: Path) -> None:
    folder = tmp_path / "schema/artd_schema"
    folder.mkdir(parents=True)
    for name in ("__init__", *(f"m{i}" for i in range(15))):
        (folder / f"{name}.py").touch()
    assert style.crowded_folders(style.read_modules(tmp_path)) == []
    (folder / "m15.py").touch()
    assert style.crowded_folders(style.read_modules(tmp_path)) == ["schema/artd_schema: 16 modules"]


def test_a_public_method_of_the_client_needs_a_docstring(tmp_path: Path) -> None:
    folder = tmp_path / "client/artd_client"
    folder.mkdir(parents=True)
    body = "    def ask(self) -> int:\n        return 1\n\n    def _own(self) -> int:\n        return 1\n"
    (folder / "client.py").write_text(f'class Client:\n    """Asks."""\n\n{body}')
    assert style.undocumented_client_names(style.read_modules(tmp_path)) == ["client/artd_client/client.py:4: ask"]


def test_the_ratchet_only_falls(tmp_path: Path) -> None:
    path = tmp_path / "ratchet.json"
    path.write_text(json.dumps({"a": 3, "b": 3, "c": 3}))
    assert style.lower(path, {"a": 2, "b": 3, "c": 4}) == ["a"]
    assert style.read_ratchet(path) == {"a": 2, "b": 3, "c": 3}
    assert style.judge("a", ["x"] * 2, 2) == ""
    assert "lower the number to 2" in style.judge("a", ["x"] * 2, 3)
    assert "4 places break this rule" in style.judge("a", ["x"] * 4, 3)

"""Wherever artd's modules lie: each can be imported, each is called by its name, and none stands for another.

Those that need torch or vLLM are imported by their own interpreters in tests/house/test_imports.py.
"""

from __future__ import annotations

import pytest

from tests.house import modules
from tests.house.imports import RUNTIME, failures


def test_the_daemons_interpreter_imports_every_module_that_needs_no_runtime() -> None:
    failed = failures(modules.importable())
    of_runtimes = {name for name, why in failed.items() if why in {f"needs {package}" for package in RUNTIME}}
    assert {name: why for name, why in failed.items() if name not in of_runtimes} == {}
    assert of_runtimes and all(name.startswith("artd_workers.") for name in of_runtimes), of_runtimes


def test_every_module_name_in_a_text_is_there() -> None:
    assert modules.unresolved() == []


def test_no_module_only_reexports() -> None:
    assert modules.reexports() == []


@pytest.mark.parametrize(
    ("package", "rest", "there"),
    [
        ("artd_client", "", True),
        ("artd_client", ".Client", True),
        ("artd_client", ".Client.run", True),
        ("artd_client", ".Nobody", False),
        ("artd_workers", ".gateway", True),
        ("artd", ".nothing", False),
        ("artd_workers", ".nothing.at_all", False),
    ],
)
def test_names_are_looked_up(package: str, rest: str, there: bool) -> None:
    assert modules.resolves(package + rest) == there


def test_names_are_found_in_texts() -> None:
    text = "{artd_client.Client}; artd.check/1, x/artd.toml, artd.replay-job/1; python -m artd.cli.main, `artd.cli.`"
    assert modules.NAME.findall(text) == ["artd_client.Client", "artd.cli.main", "artd.cli"]
    assert len(modules.mentions()) > 100, "hardly a name was found"


def test_a_module_that_is_not_there_is_told() -> None:
    nobody = "artd_client" + ".nobody"
    failed = failures(["artd_client", nobody, "json", "no_such_package"])
    assert failed == {nobody: f"needs {nobody.split('.')[0]}", "no_such_package": "needs no_such_package"}

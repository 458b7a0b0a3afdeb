"""Each fact stands once: names of a checkpoint's files, PEFT's names, a spec's defaults."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import msgspec
import pytest

from artd_schema.data.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILE, MANIFEST_FILE, OPTIMIZER_FILE, WEIGHTS_FILE
from artd_schema.run.spec import RunSpec
from artd_schema.run.spec_defaults import spec_value

ROOT = Path(__file__).parents[2]
NAMES = "schema/artd_schema/data/manifest.py"
PEFT = "workers/artd_workers/models/codec.py"
BATCH = "artd/packing/child.py"
"""A batch's manifest in the packer's folder, until it is a blob: no file of a checkpoint."""


@cache
def sources() -> dict[str, str]:
    """Map each source file to its text."""
    return {
        path.relative_to(ROOT).as_posix(): path.read_text()
        for package in ("artd", "schema", "workers", "client")
        for path in (ROOT / package).rglob("*.py")
    }


def holders(text: str) -> set[str]:
    """Return the files with a string that is `text`."""
    found = {file for file, source in sources().items() if text in source and has_string(source, text)}
    return found - ({BATCH} if text == MANIFEST_FILE else set())


def has_string(source: str, text: str) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == text for node in ast.walk(ast.parse(source)))


@pytest.mark.parametrize("name", [MANIFEST_FILE, WEIGHTS_FILE, ADAPTER_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE])
def test_a_file_of_a_checkpoint_is_named_once(name: str) -> None:
    assert holders(name) == {NAMES}


@pytest.mark.parametrize("name", ["base_model.model.", ".lora_A.weight", ".lora_B.weight"])
def test_peft_is_named_once(name: str) -> None:
    assert holders(name) == {PEFT}


def test_a_value_of_a_spec_is_its_own_or_the_default() -> None:
    own = RunSpec(model="/m", group_size=3, row_length=7)
    assert spec_value(msgspec.to_builtins(own), "group_size") == 3
    assert spec_value({}, "group_size") == spec_value({"engine": None}, "group_size") == RunSpec(model="/m").group_size
    assert spec_value({"engine": {"max_model_len": 5}}, "engine", "max_model_len") == 5
    for spec in ({}, {"engine": {}}, {"engine": None}, {"engine": {"dtype": "bfloat16"}}):
        assert spec_value(spec, "engine", "max_model_len") == own.engine.max_model_len
    with pytest.raises(KeyError):
        spec_value({}, "no_such_field")


def test_the_command_line_repeats_no_default_of_a_spec() -> None:
    for path in (ROOT / "artd/cli").rglob("*.py"):
        again = re.findall(r'spec(?:"\])?\.get\("(?!model")[^)]*, [^)]*\)', path.read_text())
        assert not again, (path, again)

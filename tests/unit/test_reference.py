"""docs/client-reference.md says what the client's source says."""

from __future__ import annotations

import ast

import pytest

import artd_client
from tests.house import reference


def test_the_page_is_that_of_the_source() -> None:
    assert reference.PAGE.read_text() == reference.render(), (
        "docs/client-reference.md is not current. Next: .venv/bin/python -m tests.house.reference --write"
    )


def test_every_public_name_has_its_place() -> None:
    text = reference.PAGE.read_text()
    assert [name for name in artd_client.__all__ if f"\n### {name}\n" not in text] == []
    assert "#### Run.submit" in text and "async def submit(" in text and "`retry_after`:" in text


def test_a_name_without_a_chapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reference.CHAPTERS, "Errors", ("ArtdError",))
    with pytest.raises(ValueError, match="differ in.*'Busy'.*Next: place them"):
        reference.render()


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def f(a) -> int: ...", "parameter 'a' of a public function has no type"),
        ("def f(*, a=1) -> int: ...", "parameter 'a' of a public function has no type"),
        ("def f(a: int): ...", "public function 'f' has no return type"),
    ],
)
def test_what_has_no_type_is_refused(source: str, says: str) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef)
    with pytest.raises(ValueError, match=says):
        reference._signature(node, "artd_client", reference.Writer())


def test_a_type_of_another_module_is_followed() -> None:
    (node,) = ast.parse("def f(a: Table, b: api.Submitted) -> AsyncGenerator[Row, None]: ...").body
    assert isinstance(node, ast.FunctionDef)
    writer = reference.Writer()
    lines = reference._signature(node, "artd_client.client", writer)
    assert lines == ["def f(a: Table, b: Submitted) -> AsyncGenerator[Row, None]"]
    assert {name: found.module for name, found in writer.mentioned.items()} == {
        "Table": "artd_client.rows",
        "Submitted": "artd_schema.wire.client_api",
        "Row": "artd_client.rows",
    }

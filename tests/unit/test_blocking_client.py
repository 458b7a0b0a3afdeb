"""client/artd_client/sync.py blocks in every method of the asynchronous client, with its parameters."""

from __future__ import annotations

import ast

import pytest

from tests.house import blocking


def test_the_blocking_client_is_that_of_the_source() -> None:
    assert blocking.PAGE.read_text() == blocking.render(), (
        "client/artd_client/sync.py is not current. Next: .venv/bin/python -m tests.house.blocking --write"
    )


@pytest.mark.parametrize(
    ("source", "becomes"),
    [
        (
            "async def f(self, a: int, *, b: str = 'x', **c: Any) -> Row: ...",
            "    def f(self, a: int, *, b: str='x', **c: Any) -> Row:\n        return C._call(self._run.f(a, b=b, **c))\n",
        ),
        ("async def f(self) -> None: ...", "    def f(self) -> None:\n        C._call(self._run.f())\n"),
        (
            "async def f(self) -> Self: ...",
            "    def f(self) -> Self:\n        C._call(self._run.f())\n        return self\n",
        ),
        (
            "def f(self) -> AsyncGenerator[Row, None]: ...",
            "    def f(self) -> Generator[Row, None, None]:\n        return C._follow(self._run.f())\n",
        ),
        (
            "@property\ndef f(self) -> int: ...",
            "    @property\n    def f(self) -> int:\n        return self._run.f\n",
        ),
    ],
)
def test_a_method_becomes_one_that_blocks(source: str, becomes: str) -> None:
    (node,) = ast.parse(source).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert blocking._render(node, "_run", "C") == becomes


def test_a_method_of_another_kind_is_written_by_hand() -> None:
    (node,) = ast.parse("def f(self) -> int: ...").body
    assert isinstance(node, ast.FunctionDef)
    with pytest.raises(ValueError, match="f is neither async nor a property; write what blocks by hand"):
        blocking._render(node, "_run", "C")

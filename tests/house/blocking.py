"""Writes client/artd_client/sync.py, the blocking client, from the source of `Client` and `Run`: `python -m tests.house.blocking --write`.

Each public method and property of theirs becomes one that blocks. What differs in more than that is written by hand in
`artd_client.blocking`, and left out here.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from . import generated

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "client/artd_client"
PAGE = CLIENT / "sync.py"
HEAD = '''"""The same client for programs without an event loop: what `Client` and `Run` do, in calls that block.

Generated from `client.py` and `run.py` by `python -m tests.house.blocking --write`: do not edit.
"""

from __future__ import annotations

'''
CLASSES = {
    "SyncClient": (
        "client.py", "Client", "BlockingClient", "_client", "self",
        '''"""`with SyncClient() as art:`; every method is that of `Client`, and blocks. Safe for many threads; it may be used where an
    event loop runs (it blocks that loop), and not in a process forked while it was open."""''',
    ),
    "SyncRun": ("run.py", "Run", "BlockingRun", "_run", "self._client", '"""See `Run`."""'),
}  # fmt: skip
"""Name -> the file and the class that it is made from, its base, and in it: the other object, and whose `_call` is used."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


def render() -> str:
    """Return the whole file. Raises ValueError for a method whose kind is not known."""
    text = HEAD + "\n".join(_imports()) + "\n\n" + "\n\n".join(map(_render_class, CLASSES))
    lint = [sys.executable, "-m", "ruff", "check", "--fix-only", "--quiet", "--select", "I,F401", "--stdin-filename", str(PAGE), "-"]  # fmt: skip
    form = [sys.executable, "-m", "ruff", "format", "--quiet", "--stdin-filename", str(PAGE), "-"]
    for command in (lint, form):
        text = subprocess.run(command, input=text, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return text


def _imports() -> list[str]:
    """Return the imports of both files and of the bases; ruff drops what is not used, and puts them in order."""
    found = ["from collections.abc import Generator", "from .blocking import BlockingClient, BlockingRun", "from .client import Client"]  # fmt: skip
    for file in ("client.py", "run.py"):
        nodes = _parse(file).body
        found += [ast.unparse(node) for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
    return list(dict.fromkeys(line for line in found if "__future__" not in line))


def _parse(file: str) -> ast.Module:
    return ast.parse((CLIENT / file).read_text())


def _functions(file: str, name: str) -> list[Function]:
    """Return the functions of a class, in the order of the file."""
    (found,) = (node for node in _parse(file).body if isinstance(node, ast.ClassDef) and node.name == name)
    return [node for node in found.body if isinstance(node, Function)]


def _render_class(name: str) -> str:
    file, source, base, other, caller, text = CLASSES[name]
    by_hand = {node.name for node in _functions("blocking.py", base)}
    nodes = [node for node in _functions(file, source) if not node.name.startswith("_") and node.name not in by_hand]
    methods = [_render(node, other, caller) for node in nodes if node.name not in HIDDEN]
    start = [_start(node) for node in _functions(file, source) if node.name == "__init__" and name == "SyncClient"]
    return f"class {name}({base}):\n    {text}\n\n" + "\n".join(start + methods)


HIDDEN = {"closing"}
"""What only the client itself calls."""


def _start(node: Function) -> str:
    return f"    def __init__({ast.unparse(node.args)}) -> None:\n        super().__init__(Client({_passed(node)}))\n"


def _render(node: Function, other: str, caller: str) -> str:
    """Return the source of the method that blocks."""
    if any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list):
        return f"    @property\n    {_head(node, _returns(node))}        return self.{other}.{node.name}\n"
    inner, result = f"self.{other}.{node.name}({_passed(node)})", _returns(node)
    if result.startswith("AsyncGenerator["):
        result = result.replace("AsyncGenerator", "Generator").replace(", None]", ", None, None]")
        return f"    {_head(node, result)}        return {caller}._follow({inner})\n"
    if not isinstance(node, ast.AsyncFunctionDef):
        raise ValueError(
            f"{node.name} is neither async nor a property; write what blocks by hand in {CLIENT / 'blocking.py'}"
        )
    call = f"{caller}._call({inner})"
    if result == "Self":
        return f"    {_head(node, result)}        {call}\n        return self\n"
    if result == "Run":
        return f"    {_head(node, 'SyncRun')}        return SyncRun(self, {call})\n"
    return f"    {_head(node, result)}        {'' if result == 'None' else 'return '}{call}\n"


def _returns(node: Function) -> str:
    if node.returns is None:
        raise ValueError(f"public function {node.name!r} has no return type")
    return ast.unparse(node.returns)


def _head(node: Function, result: str) -> str:
    return f"def {node.name}({ast.unparse(node.args)}) -> {result}:\n"


def _passed(node: Function) -> str:
    """Return the parameters as the arguments of a call."""
    plain = [item.arg for item in [*node.args.posonlyargs, *node.args.args] if item.arg != "self"]
    named = [f"{item.arg}={item.arg}" for item in node.args.kwonlyargs]
    rest = [f"**{node.args.kwarg.arg}"] if node.args.kwarg else []
    return ", ".join([*plain, *named, *rest])


if __name__ == "__main__":
    sys.exit(generated.main(PAGE, render, sys.argv[1:]))

"""Writes docs/client-reference.md from the source of `artd_client`: `python -m tests.house.reference --write`.

It reads syntax trees and imports nothing of the client, so every supported Python writes the same bytes.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from . import generated

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/client-reference.md"
SOURCES = {"artd_client": ROOT / "client", "artd_schema": ROOT / "schema"}
WIDTH = 100
HEAD = """# Client reference

Every public name of `artd_client`, generated from its source by `python -m tests.house.reference --write`: do not edit. `from artd import Client` is the
same class. [Your rollout loop](trajectories.md) shows how they are used, [the fields of a run](run.md) what each field of a spec does.
"""
CHAPTERS = {
    "The client": ("Client", "Run", "Rollout", "Group", "Remote"),
    "Trajectories by value": ("turn", "Turn", "Sampling", "ExchangeRef"),
    "Trajectories to read": ("Trajectory",),
    "Answers": ("Submitted", "GroupInfo", "StepInfo", "RunInfo"),
    "The spec of a run": ("RunSpec", "LoraSpec", "OptimizerSpec", "LossSpec", "CorrectionSpec", "KlSpec", "AdvantageSpec", "LengthSpec", "EngineSpec", "TrainerSpec"),
    "Without an event loop": ("SyncClient", "SyncRun", "SyncRollout", "SyncGroup"),
    "Errors": (
        "ArtdError", "Busy", "Closed", "Conflict", "DaemonNotRunning", "Draining", "Failed", "Invalid", "NotAllowed", "NotFound", "Stalled",
        "TimedOut", "TooLarge", "WrongProtocol",
    ),
}  # fmt: skip
TWINS = {"SyncClient": "Client", "SyncRun": "Run", "SyncRollout": "Rollout", "SyncGroup": "Group"}
"""Classes whose methods are those of another one, and block."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
Statement = ast.ClassDef | Function | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class Definition:
    """A name, the module that defines it, and its statement there."""

    module: str
    name: str
    node: Statement


@dataclass
class Writer:
    """The page so far, and the names of `artd_*` that its signatures mention."""

    lines: list[str] = field(default_factory=list)
    mentioned: dict[str, Definition] = field(default_factory=dict)

    def add(self, *lines: str) -> None:
        self.lines += [*lines, ""]

    def code(self, *lines: str) -> None:
        self.add("```python", *lines, "```")


@cache
def parse(module: str) -> ast.Module:
    """Parse a module of `SOURCES`, a package by its `__init__`. Raises FileNotFoundError when there is none."""
    path = SOURCES[module.partition(".")[0]].joinpath(*module.split("."))
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def exports() -> list[str]:
    """Return `artd_client.__all__`."""
    found = find("artd_client", "__all__")
    assert found is not None and isinstance(found.node, ast.Assign)
    return list(ast.literal_eval(found.node.value))


def find(module: str, name: str) -> Definition | None:
    """Return where a name that `module` uses is defined, through its imports; None if that is outside of `SOURCES`."""
    for node in _statements(parse(module).body):
        if isinstance(node, Statement) and name in _names(node):
            return Definition(module, name, node)
        if isinstance(node, ast.ImportFrom):
            for item in node.names:
                if (item.asname or item.name) == name:
                    source = _absolute(module, node)
                    return find(source, item.name) if source.partition(".")[0] in SOURCES else None
    return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.If):  # `if TYPE_CHECKING:`
            yield from node.body
        else:
            yield node


def _names(node: Statement) -> list[str]:
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.AnnAssign):
        return [node.target.id] if isinstance(node.target, ast.Name) else []
    return [node.name]


def _absolute(module: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = module if module in SOURCES else module.rpartition(".")[0]
    return ".".join(filter(None, [package, node.module]))


class _Plain(ast.NodeTransformer):
    """Writes `api.Submitted` as `Submitted`, and notes every name of an annotation."""

    def __init__(self, module: str, mentioned: dict[str, Definition]) -> None:
        self.module = module
        self.mentioned = mentioned

    def visit_Name(self, node: ast.Name) -> ast.Name:
        self._note(self.module, node.id)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        if isinstance(node.value, ast.Name) and node.value.id == "api":
            self._note("artd_schema.wire.client_api", node.attr)
            return ast.Name(node.attr)
        return node

    def _note(self, module: str, name: str) -> None:
        found = find(module, name)
        if found is not None and not name.startswith("_"):
            self.mentioned.setdefault(name, found)


def _type(node: ast.expr, module: str, writer: Writer) -> str:
    return _source(_Plain(module, writer.mentioned).visit(node))


def _source(node: ast.expr) -> str:
    """Return an expression as ruff formats it: `ast.unparse` writes other quotes."""
    return re.sub(r"'([^'\"\\]*)'", r'"\1"', ast.unparse(node))


def _parameters(node: Function, module: str, writer: Writer) -> list[str]:
    """Return the parameters as source, without `self`. Raises ValueError for one without a type."""
    spec = node.args
    plain = [*spec.posonlyargs, *spec.args]
    defaults = [None] * (len(plain) - len(spec.defaults)) + list(spec.defaults)
    pairs = [pair for pair in zip(plain, defaults, strict=True) if pair[0].arg != "self"]
    found = [_parameter(item, default, module, writer) for item, default in pairs]
    if spec.vararg:
        found.append("*" + _parameter(spec.vararg, None, module, writer))
    elif spec.kwonlyargs:
        found.append("*")
    found += [
        _parameter(item, default, module, writer)
        for item, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    if spec.kwarg:
        found.append("**" + _parameter(spec.kwarg, None, module, writer))
    return found


def _parameter(item: ast.arg, default: ast.expr | None, module: str, writer: Writer) -> str:
    if item.annotation is None:
        raise ValueError(f"{module}:{item.lineno}: parameter {item.arg!r} of a public function has no type")
    text = f"{item.arg}: {_type(item.annotation, module, writer)}"
    return text if default is None else f"{text} = {_source(default)}"


def _call(head: str, parameters: list[str], tail: str) -> list[str]:
    line = f"{head}({', '.join(parameters)}){tail}"
    if len(line) <= WIDTH:
        return [line]
    return [f"{head}(", *(f"    {parameter}," for parameter in parameters), f"){tail}"]


def _signature(node: Function, module: str, writer: Writer) -> list[str]:
    if node.returns is None:
        raise ValueError(f"{module}:{node.lineno}: public function {node.name!r} has no return type")
    keyword = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    tail = f" -> {_type(node.returns, module, writer)}"
    return _call(f"{keyword} {node.name}", _parameters(node, module, writer), tail)


def _is_property(node: Function) -> bool:
    return any(isinstance(mark, ast.Name) and mark.id == "property" for mark in node.decorator_list)


def _write(writer: Writer, found: Definition) -> None:
    writer.add(f"### {found.name}")
    if isinstance(found.node, ast.ClassDef):
        _write_class(writer, found, found.node)
    elif isinstance(found.node, Function):
        writer.code(*_signature(found.node, found.module, writer))
        writer.add(ast.get_docstring(found.node) or "")


def _assignment(writer: Writer, found: Definition) -> str:
    """Return the source of an alias or a constant."""
    assert isinstance(found.node, ast.Assign | ast.AnnAssign) and found.node.value is not None
    return f"{found.name} = {_type(found.node.value, found.module, writer)}"


def _write_class(writer: Writer, found: Definition, node: ast.ClassDef) -> None:
    functions = [item for item in node.body if isinstance(item, Function)]
    if found.name in TWINS:
        functions = _inherited(found, node) + functions
    bases = [base for base in map(ast.unparse, node.bases) if base.endswith(("Error", "Exception"))]
    start = next((item for item in functions if item.name == "__init__"), None)
    head = f"class {found.name}"
    if bases or start is None or found.name == "SyncRun" or found.name == "Run":  # nobody constructs those
        writer.code(f"{head}({', '.join(bases)})" if bases else head, *_fields(writer, found, node))
    else:
        writer.code(*_call(head, _parameters(start, found.module, writer), ""))
    writer.add(ast.get_docstring(node) or "")
    public = [item for item in functions if not item.name.startswith("_")]
    _write_properties(writer, found, [item for item in public if _is_property(item)])
    methods = [item for item in public if not _is_property(item)]
    if found.name in TWINS:
        _write_twins(writer, found, methods)
        return
    for item in methods:
        writer.add(f"#### {found.name}.{item.name}")
        writer.code(*_signature(item, found.module, writer))
        if text := ast.get_docstring(item):
            writer.add(text)


def _inherited(found: Definition, node: ast.ClassDef) -> list[Function]:
    """Return the functions of the bases, without `__init__`."""
    bases = [find(found.module, ast.unparse(base)) for base in node.bases]
    nodes = [base.node for base in bases if base is not None and isinstance(base.node, ast.ClassDef)]
    return [item for base in nodes for item in base.body if isinstance(item, Function) and item.name != "__init__"]


def _write_twins(writer: Writer, found: Definition, methods: list[Function]) -> None:
    writer.add(f"Methods: those of `{TWINS[found.name]}`; each blocks until the other returns.")
    writer.code(*(line for item in methods for line in _signature(item, found.module, writer)))
    for item in methods:
        if text := ast.get_docstring(item):
            writer.add(f"`{item.name}`: {text}")


def _fields(writer: Writer, found: Definition, node: ast.ClassDef) -> list[str]:
    lines = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            text = f"    {ast.unparse(item.target)}: {_type(item.annotation, found.module, writer)}"
            lines.append(text if item.value is None else f"{text} = {_source(_constant(item.value, found.module))}")
    return lines


def _constant(node: ast.expr, module: str) -> ast.expr:
    """Return the value of a name that stands for a constant elsewhere in the source, and any other expression as it is."""
    found = find(module, node.id) if isinstance(node, ast.Name) else None
    value = found.node.value if found and isinstance(found.node, ast.Assign | ast.AnnAssign) else None
    return value if isinstance(value, ast.Constant) else node


def _write_properties(writer: Writer, found: Definition, nodes: list[Function]) -> None:
    if not nodes:
        return
    writer.add("| property | type | |", "|---|---|---|")
    writer.lines.pop()
    twin = TWINS.get(found.name)
    for node in nodes:
        assert node.returns is not None
        text = " ".join((ast.get_docstring(node) or (f"`{twin}.{node.name}`" if twin else "")).split())
        shown = _type(node.returns, found.module, writer).replace("|", "\\|")
        writer.lines.append(f"| `{node.name}` | `{shown}` | {text} |".replace("  |", " |"))
    writer.lines.append("")


def render() -> str:
    """Return the whole page. Raises ValueError when `CHAPTERS` is not `__all__`, or a public parameter has no type."""
    placed = [name for names in CHAPTERS.values() for name in names]
    if odd := set(placed) ^ set(exports()):
        raise ValueError(f"CHAPTERS and artd_client.__all__ differ in {sorted(odd)}. Next: place them in {__file__}")
    writer = Writer([HEAD])
    for chapter, names in CHAPTERS.items():
        writer.add(f"## {chapter}")
        for name in names:
            found = find("artd_client", name)
            assert found is not None, name
            _write(writer, found)
    _write_types(writer, set(placed))
    return "\n".join(writer.lines).rstrip() + "\n"


def _write_types(writer: Writer, done: set[str]) -> None:
    """Write what the signatures mention beside the names in `done`: aliases in one block, then classes."""
    aliases, classes = {}, []
    while left := sorted(set(writer.mentioned) - done):  # a type may mention others
        for found in (writer.mentioned[name] for name in left):
            if isinstance(found.node, ast.ClassDef):
                classes.append(found)
                _write(Writer(mentioned=writer.mentioned), found)
            else:
                aliases[found.name] = _assignment(writer, found)
        done |= set(left)
    writer.add("## Types that the signatures mention")
    writer.code(*(aliases[name] for name in sorted(aliases)))
    for found in classes:
        _write(writer, found)


if __name__ == "__main__":
    sys.exit(generated.main(PAGE, render, sys.argv[1:]))

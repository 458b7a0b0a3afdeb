"""Find module names in texts that do not resolve, and modules that only re-export.

Nothing here imports a module of artd: `imports.py` does that, in any interpreter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "artd": ROOT / "artd",
    "artd_workers": ROOT / "workers/artd_workers",
    "artd_schema": ROOT / "schema/artd_schema",
    "artd_client": ROOT / "client/artd_client",
}
FACADES = {
    "artd_client": "what a user's program imports",
}
"""Packages whose `__init__` may hold nothing but imports: no other one, and each of these does."""
TEXTS = ("pyproject.toml", "Makefile", ".ci", "README.md", "CONTRIBUTING.md", "docs")
"""Files, or folders of them, that name modules besides the Python ones of SOURCES."""
SOURCES = (*(str(folder.relative_to(ROOT)) for folder in PACKAGES.values()), "tests", "examples")
NAME = re.compile(r"(?<![\w./@-])(?:artd|artd_workers|artd_schema|artd_client)(?:\.[A-Za-z_]\w*)+(?![\w/-])")
NO_MODULES = re.compile(r"artd\.(db|lock|toml|folder|pth|log|gateway|losses|refused|deep\..*)$|artd_workers\.NAME$")
"""Names of files, of a logger, of a group of entry points, of a key of a request's scope, of samples in tests, and a word for any module."""
_DEFINES = re.compile(r"^(?:(?:async )?def \w+\(|class \w+[(:])", re.MULTILINE)
"""A function or class of a module; to parse the others is quick."""
_IMPORTS = re.compile(r"^ *(from|import) .*$", re.MULTILINE)


class Mention(NamedTuple):
    """A dotted name in a text. `where` is file and line."""

    where: str
    name: str


@cache
def modules() -> dict[str, Path]:
    """Map the dotted name of every module to its file; a package is its `__init__`, or its folder where it has none."""
    found: dict[str, Path] = {}
    for package, folder in PACKAGES.items():
        found[package] = folder
        for path in sorted(folder.rglob("*")):
            if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__"):
                found.setdefault(_dotted(package, folder, path), path)
        for path in folder.rglob("__init__.py"):
            found[_dotted(package, folder, path)] = path
    return found


def _dotted(package: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1:] == ("__init__",) else parts)))


def importable() -> list[str]:
    """Return the names of the modules that are files."""
    return sorted(name for name, path in modules().items() if path.suffix == ".py")


# ---- names that stand in texts --------------------------------------------------------------------------------------


def unresolved() -> list[Mention]:
    """Return the mentions of modules and names that do not exist."""
    return [mention for mention in mentions() if not (NO_MODULES.match(mention.name) or resolves(mention.name))]


@cache
def mentions() -> tuple[Mention, ...]:
    """Return every dotted name of artd in a string of the source, docstrings too, and in TEXTS."""
    return tuple(_mentions())


def _mentions() -> Iterator[Mention]:
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield from _strings(path)
    for name in TEXTS:
        for path in sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]:
            if path.is_file() and path.suffix != ".png":
                for number, line in enumerate(path.read_text().splitlines(), 1):
                    yield from (Mention(_where(path, number), found) for found in NAME.findall(line))


def _strings(path: Path) -> Iterator[Mention]:
    text = path.read_text()
    if not NAME.search(_IMPORTS.sub("", text)):  # to parse is most of the time
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (Mention(_where(path, node.lineno), found) for found in NAME.findall(node.value))


def _where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def resolves(name: str) -> bool:
    """Say whether a dotted name is a module, or begins with a module and a name of its body."""
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        path = modules().get(".".join(parts[:count]))
        if path is not None:
            return count == len(parts) or (path.suffix == ".py" and parts[count] in _top_names(path))
    return False


@cache
def _top_names(path: Path) -> frozenset[str]:
    """Return the names that a module's body binds, in branches too."""
    found: set[str] = {"__path__", "__file__", "__name__"}
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    while nodes:
        for node in ast.iter_child_nodes(nodes.pop()):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
                continue
            if isinstance(node, ast.Import | ast.ImportFrom):
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            nodes.append(node)
    return frozenset(found)


# ---- modules that only re-export ------------------------------------------------------------------------------------


def reexports() -> list[str]:
    """Return the modules whose body holds only imports, without FACADES, and each of FACADES whose body holds more."""
    only = {name for name in importable() if _only_imports(modules()[name])}
    return sorted(only ^ FACADES.keys())


def _only_imports(path: Path) -> bool:
    text = path.read_text()
    if _DEFINES.search(text):
        return False
    body = ast.parse(text).body
    rest = [node for node in body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    return bool(rest) and all(isinstance(node, ast.Import | ast.ImportFrom) or _is_all(node) for node in rest)


def _is_all(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"

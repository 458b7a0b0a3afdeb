"""Counts the places that break a rule of docs/style.md that a machine can see.

`python -m tests.house.style` compares the counts with ratchet.json, `… RULE` lists the places of one rule, `… --write` lowers the
numbers that can be lowered.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
RATCHET = Path(__file__).with_name("ratchet.json")
PACKAGES = {
    "artd": "artd",
    "artd_schema": "schema/artd_schema",
    "artd_client": "client/artd_client",
    "artd_workers": "workers/artd_workers",
}
MOST_LINES = 400
MOST_MODULES = 15
# Verbs and nouns that only look like participles.
_NO_PARTICIPLES = {"embed", "exceed", "feed", "need", "proceed", "seed", "shed", "speed"}
_IRREGULAR = {
    "built", "done", "drawn", "found", "given", "gone", "heard", "held", "kept", "known", "left",
    "lost", "made", "meant", "seen", "sent", "shown", "taken", "told",
}  # fmt: skip
_HEADER = re.compile(r"\b(?:Owner of\b|(?:Owner|Invariants?|Purpose|Errors):)")
_TOGETHER = re.compile(r"(?:^|[,.;] )together\.(?:\s|$)", re.I)

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module


@dataclass(frozen=True)
class Module:
    """One source file. package: the dotted name of its folder; definitions: the module itself and everything defined in it."""

    path: Path
    package: str
    text: str
    tree: ast.Module
    definitions: tuple[Definition, ...]
    imports: tuple[ast.ImportFrom, ...]


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield `node` and every statement inside it. It never enters expressions, which are most of a tree."""
    yield node
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inner in getattr(node, name, ()):
            yield from _statements(inner)


def _line(node: Definition) -> int:
    return 1 if isinstance(node, ast.Module) else node.lineno


Places = list[str]
"""`path:line: what`, one for each break of a rule."""


def read_modules(root: Path = ROOT) -> tuple[Module, ...]:
    """Parse every source module under `root`."""
    found = []
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            dotted = ".".join([package, *path.parent.relative_to(root / folder).parts])
            text = path.read_text()
            tree = ast.parse(text)
            nodes = list(_statements(tree))
            definitions = tuple(node for node in nodes if isinstance(node, Definition))
            imports = tuple(node for node in nodes if isinstance(node, ast.ImportFrom))
            found.append(Module(path.relative_to(root), dotted, text, tree, definitions, imports))
    return tuple(found)


def _docstrings(modules: tuple[Module, ...], breaks: Callable[[str], object]) -> Places:
    places = []
    for module in modules:
        for node in module.definitions:
            text = ast.get_docstring(node) or ""
            if text and breaks(text):
                places.append(f"{module.path}:{_line(node)}: {text.splitlines()[0]}")
    return places


def headers(modules: tuple[Module, ...]) -> Places:
    """Find docstrings with a header, such as "Owner of:", where a sentence says the same."""
    return _docstrings(modules, _HEADER.search)


def fragments_with_of(modules: tuple[Module, ...]) -> Places:
    """Find docstrings that begin with "Of "."""
    return _docstrings(modules, lambda text: re.match(r"Of\s", text))


def together_for_collective(modules: tuple[Module, ...]) -> Places:
    """Find docstrings that say "together." where "Collective:" is the word."""
    return _docstrings(modules, _TOGETHER.search)


def participles_for_verbs(modules: tuple[Module, ...]) -> Places:
    """Find functions named by one participle; properties and predicates may be."""
    places = []
    for module in modules:
        for node in module.definitions:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_participle(node):
                places.append(f"{module.path}:{node.lineno}: {node.name}")
    return places


def _is_participle(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    name = node.name.strip("_")
    if name in _NO_PARTICIPLES or not (re.fullmatch("[a-z]+ed", name) or name in _IRREGULAR):
        return False
    is_predicate = node.returns is not None and ast.unparse(node.returns) == "bool"
    marks = [ast.unparse(mark) for mark in node.decorator_list]
    return not is_predicate and not any("property" in mark or mark.endswith(".setter") for mark in marks)


def imports_of_parents(modules: tuple[Module, ...]) -> Places:
    """Find relative imports that leave their folder, up or down."""
    places = []
    for module in modules:
        for node in module.imports:
            if node.level > 1 or (node.level == 1 and "." in (node.module or "")):
                places.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    return places


def absolute_imports_of_siblings(modules: tuple[Module, ...]) -> Places:
    """Find absolute imports of modules of the same folder."""
    names = {(module.package, module.path.stem) for module in modules}
    places = []
    for module in modules:
        for node in module.imports:
            if node.level or not node.module:
                continue
            folder, _, last = node.module.rpartition(".")
            beside = folder == module.package and (folder, last) in names
            inside = node.module == module.package and any((module.package, item.name) in names for item in node.names)
            if beside or inside:
                places.append(f"{module.path}:{node.lineno}: {ast.unparse(node)}")
    return places


def long_files(modules: tuple[Module, ...]) -> Places:
    """Find files above 400 lines."""
    sizes = {module.path: len(module.text.splitlines()) for module in modules}
    return [f"{path}:1: {lines} lines" for path, lines in sizes.items() if lines > MOST_LINES]


def crowded_folders(modules: tuple[Module, ...]) -> Places:
    """Find folders above fifteen modules, `__init__` and `__main__` not counted."""
    crowd = Counter(module.path.parent for module in modules if not module.path.stem.startswith("__"))
    return [f"{folder}: {count} modules" for folder, count in crowd.items() if count > MOST_MODULES]


def undocumented_client_names(modules: tuple[Module, ...]) -> Places:
    """Find public functions, methods and classes of the client without a docstring; `SyncClient` repeats those of `Client`."""
    places = []
    for module in modules:
        if module.package != "artd_client" or module.path.stem == "sync":
            continue
        classes = [node for node in module.tree.body if isinstance(node, ast.ClassDef)]
        for node in itertools.chain(module.tree.body, *(scope.body for scope in classes)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node):
                places.append(f"{module.path}:{node.lineno}: {node.name}")
    return places


RULES: dict[str, Callable[[tuple[Module, ...]], Places]] = {
    rule.__name__: rule
    for rule in (
        headers,
        fragments_with_of,
        together_for_collective,
        participles_for_verbs,
        imports_of_parents,
        absolute_imports_of_siblings,
        long_files,
        crowded_folders,
        undocumented_client_names,
    )
}


@cache
def count_all(root: Path = ROOT) -> dict[str, Places]:
    """Return the places of every rule under `root`, by rule."""
    modules = read_modules(root)
    return {name: rule(modules) for name, rule in RULES.items()}


def read_ratchet(path: Path = RATCHET) -> dict[str, int]:
    """Return the number that each rule may have."""
    return dict(json.loads(path.read_text()))


def judge(rule: str, places: Places, allowed: int) -> str:
    """Return what is wrong with a rule's count and the next command, or "" if the count is `allowed`."""
    found = len(places)
    if found > allowed:
        listing = f"`.venv/bin/python -m tests.house.style {rule}` lists them"
        return f"{rule}: {found} places break this rule of docs/style.md, {allowed} are allowed. Next: {listing}"
    if found < allowed:
        return (
            f"{rule}: lower the number to {found} (from {allowed}). Next: .venv/bin/python -m tests.house.style --write"
        )
    return ""


def lower(path: Path, counts: dict[str, int]) -> list[str]:
    """Write each count that is below its number in `path`. Returns the rules that were lowered."""
    numbers = read_ratchet(path)
    lowered = [rule for rule, number in numbers.items() if counts[rule] < number]
    path.write_text(json.dumps(numbers | {rule: counts[rule] for rule in lowered}, indent=2) + "\n")
    return lowered


def main(arguments: list[str]) -> int:
    found = count_all()
    if arguments == ["--write"]:
        for rule in lower(RATCHET, {rule: len(places) for rule, places in found.items()}):
            print(f"{rule}: {len(found[rule])}")
        return 0
    if unknown := [name for name in arguments if name not in found]:
        print(f"error: unknown rule {unknown[0]!r}; use --write or one of: {', '.join(found)}", file=sys.stderr)
        return 2
    for rule in arguments:
        print(*found[rule], sep="\n")
    if not arguments:
        for rule, number in read_ratchet().items():
            print(f"{rule:30} {len(found[rule]):5} of {number}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

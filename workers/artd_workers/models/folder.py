"""Makes a model folder that appears complete and durable, or not at all.

It is filled under another name beside the target, and fsynced before it is renamed. Of two processes that make it at the same
time, the second one uses the folder of the first.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def create_folder(out: Path) -> Iterator[Path]:
    """Yield an empty folder to fill. Afterwards it is synced and renamed to `out`; after an error it is removed."""
    partial = out.with_name(f".{out.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in (*partial.iterdir(), partial):
            _sync(path)
        try:
            partial.rename(out)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON with sorted keys, so that the same value gives the same bytes."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

"""Files through which trainer and engine meet: whoever finds one under its name finds all of it.

Only this user can read them. They serve processes that run now, so nothing is made durable.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path`, in place of what was there."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(data)
    draft.replace(path)

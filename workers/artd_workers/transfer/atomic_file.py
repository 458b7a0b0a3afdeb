"""Files by which trainer and engine meet: whoever finds one under its name finds all of it.

Owner of: no state. Only this user may read them. They are for processes that live now: nothing is made durable.
"""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Replaces what was there."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.touch(mode=0o600)
    draft.write_bytes(data)
    draft.replace(path)

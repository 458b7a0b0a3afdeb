"""DATA/gateway.json (0600): where rollout programs that are not clients find the gateway, and its bearer token.

Owner of: that file. Invariants: a disk that is full delays the file and nothing else: `artctl status` tells the address, too.
"""

from __future__ import annotations

import json
from pathlib import Path

from artd.store import fs


def write_gateway_file(root: Path, url: str, token: str) -> None:
    """Replace the file, unless it says the same already: a gateway keeps its port where it can."""
    path, content = root / "gateway.json", json.dumps({"url": url, "token": token}).encode()
    if path.exists() and path.read_bytes() == content:
        return
    fs.write_or_later(path.name, lambda: fs.write_file(path, content))

"""Writes DATA/gateway.json (mode 0600), from which rollout programs that are not clients learn the gateway's address
and bearer token.

Owns that file. A full disk delays only the file: `artctl status` shows the address, too.
"""

from __future__ import annotations

import json
from pathlib import Path

from artd.store import fs


def write_gateway_file(root: Path, url: str, token: str) -> None:
    """Write the file unless its content is already right, which is usual, because a gateway keeps its port where it
    can."""
    path, content = root / "gateway.json", json.dumps({"url": url, "token": token}).encode()
    if path.exists() and path.read_bytes() == content:
        return
    fs.write_or_later(path.name, lambda: fs.write_file(path, content))

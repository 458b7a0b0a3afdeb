"""DATA/gateway.json (0600): where rollout programs that are not clients find the gateway, and its bearer token."""

from __future__ import annotations

import json
from pathlib import Path

from .store import fs


def write_gateway_file(root: Path, url: str, token: str) -> None:
    fs.write_file(root / "gateway.json", json.dumps({"url": url, "token": token}).encode())

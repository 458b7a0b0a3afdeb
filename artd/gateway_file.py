"""DATA/gateway.json (0600): where rollout programs that are not clients find the gateway, and its bearer token.

Owner of: that file. Invariants: a full disk costs no more than the file: `artctl status` tells the address, too.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from .store import fs

log = logging.getLogger(__name__)


def write_gateway_file(root: Path, url: str, token: str) -> None:
    """Replace the file, unless it says the same already: a gateway keeps its port where it can."""
    path, content = root / "gateway.json", json.dumps({"url": url, "token": token}).encode()
    if path.exists() and path.read_bytes() == content:
        return
    try:
        fs.write_file(path, content)
    except OSError as error:
        if not fs.is_full(error):
            raise
        log.warning("%s cannot be written: %s; the gateway is at %s", path, error, url)

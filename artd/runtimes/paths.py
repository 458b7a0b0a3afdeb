"""Where runtimes live on disk.

Owner: runtimes. Invariants: nothing here creates or reads a file; a runtime's folder is named after the digest of the
lock that it is made from, so two artd versions never share or overwrite one.
"""

import os
import sys
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"
MARKER = "artd-runtime.json"


def data_home() -> Path:
    """The XDG data folder; a relative XDG_DATA_HOME counts as unset, as the XDG rules say."""
    configured = os.environ.get("XDG_DATA_HOME", "")
    return Path(configured) if configured.startswith("/") else Path.home() / ".local" / "share"


def runtimes_root() -> Path:
    return data_home() / "artd" / "runtimes"


def log_root() -> Path:
    """Logs of installs; outside the runtime folders, so that they outlive a deleted half-made one."""
    return data_home() / "artd" / "install-logs"


def minor_of_running() -> str:
    return f"py{sys.version_info[0]}{sys.version_info[1]}"

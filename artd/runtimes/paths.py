"""Says where runtimes are on disk.

A runtime's folder is named after the digest of its lock, so two versions of artd never share or overwrite one.
"""

import os
import sys
from pathlib import Path

LOCKS = Path(__file__).parent / "locks"
MARKER = "artd-runtime.json"


def data_home() -> Path:
    """Return the XDG data folder. A relative XDG_DATA_HOME counts as unset, as the XDG specification says."""
    configured = os.environ.get("XDG_DATA_HOME", "")
    return Path(configured) if configured.startswith("/") else Path.home() / ".local" / "share"


def runtimes_root() -> Path:
    return data_home() / "artd" / "runtimes"


def log_root() -> Path:
    """Return the folder of install logs. It is outside the runtime folders, so that logs outlive a deleted one."""
    return data_home() / "artd" / "install-logs"


def minor_of_running() -> str:
    return f"py{sys.version_info[0]}{sys.version_info[1]}"

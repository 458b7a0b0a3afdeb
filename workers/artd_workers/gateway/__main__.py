"""Entry point: `python -m artd_workers.gateway`, started by the daemon's supervisor."""

from __future__ import annotations

import sys

from .worker import main

if __name__ == "__main__":
    sys.exit(main())

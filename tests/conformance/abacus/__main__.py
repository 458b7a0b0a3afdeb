"""The engine harness in a process that has the abacus as an engine: `python -m tests.conformance.abacus`."""

from __future__ import annotations

import sys

from artd_workers.engines.__main__ import main

from .entry import register

if __name__ == "__main__":
    register()
    sys.exit(main())

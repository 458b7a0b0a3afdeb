"""What every test may rely on. Owner of: this process's answer to Ctrl-C.

Invariants: SIGINT is not ignored, here and in what tests start, even where a shell started pytest in the background.
"""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)

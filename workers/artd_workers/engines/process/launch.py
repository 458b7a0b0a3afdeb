"""Becomes another program that dies with its parent: `python -m artd_workers.engines.process.launch PARENT_PID PROGRAM
ARGS...`.

It sets PR_SET_PDEATHSIG for a stock server. The kernel keeps the setting across exec, and setting it in the new process needs
no code between fork and exec. The signal comes when the *thread* that started this process ends, so the harness starts servers
from its main thread only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, program, *arguments = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != int(parent):
        raise SystemExit("the harness ended before its server started")
    try:
        os.execvp(program, [program, *arguments])
    except OSError as error:
        raise SystemExit(f"{program} cannot be started: {error.strerror}") from None


if __name__ == "__main__":
    main()

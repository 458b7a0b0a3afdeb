"""`python -m artd.models NAME`: the child process of the daemon that fetches and hashes a model.

It prints JSON lines: {"doing": text} while it works, and at the end {"path", "base"} or {"error": text}.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

import msgspec

from artd.errors import RequestError

from .base_model import pin
from .fetch import FetchError, fetch
from .names import parse


def _print(value: dict[str, object]) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(value) + b"\n")
    sys.stdout.flush()


def main(text: str) -> int:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the daemon
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that `finally` blocks end its children
    name = parse(text)
    assert name is not None
    try:
        path = fetch(name, lambda doing: _print({"doing": doing}))
        _print({"doing": f"{text}: hashing its files"})
        _print({"path": str(path), "base": pin(str(path))})
    except (FetchError, RequestError, OSError) as error:
        _print({"error": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        code = main(sys.argv[1])
    os._exit(code)  # a thread of a download library must not hold it up

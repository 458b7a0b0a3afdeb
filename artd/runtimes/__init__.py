"""Runtimes: the virtual environments of trainer and engine, each made from a lock that artd ships.

`find(name, device)` is what the supervisor needs, `install.install` makes a runtime, `doctor.report` says what is there.
Nothing here imports a runtime's packages.
"""

from .lockfile import LockError
from .registry import Runtime, RuntimeMissing, find

__all__ = ["LockError", "Runtime", "RuntimeMissing", "find"]

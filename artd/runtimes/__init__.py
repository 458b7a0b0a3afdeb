"""Runtimes: the trainer's and the engine's own virtual environments, each made from a shipped lock alone.

Owner: runtimes. `find(name, device)` is what the supervisor needs; `install.install` makes one; `doctor.report` says
what is there. Invariants: nothing here imports a runtime's packages.
"""

from .lockfile import LockError
from .registry import Runtime, RuntimeMissing, find

__all__ = ["LockError", "Runtime", "RuntimeMissing", "find"]

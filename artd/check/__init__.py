"""`artd check`: what must hold of every database and every file beside it, at every moment, looked at from outside.

Owner of: nothing; everything here is read-only. Invariants: a check promises what holds after *every* commit, so it is
true of a crashed folder before its recovery, of a running daemon's snapshot and of a backup alike; what a crash may
leave behind and the next boot removes is a note, never a violation.
"""

from .report import Note, Outcome, Report, Violation
from .run import check

__all__ = ["Note", "Outcome", "Report", "Violation", "check"]

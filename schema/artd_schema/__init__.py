"""Everything of artd that crosses a process boundary or reaches disk.

Purpose: one place for the msgspec Structs, the SQL and the codecs shared by daemon, workers and client.
Owner of: no state. Invariants: imports msgspec and the standard library only; fields are only ever added, with a
default.
"""

PROTOCOL = 1

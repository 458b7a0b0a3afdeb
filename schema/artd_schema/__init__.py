"""Everything of artd that crosses a process boundary or reaches disk: msgspec Structs, SQL and codecs.

Daemon, workers and client share it. It imports only msgspec and the standard library. Fields are only ever added, with a
default.
"""

PROTOCOL = 1

"""The trainer's side of the direct push: the plan (`layout.py`, `plan.py`), and the memory that an engine pulls (`source.py`).

Not wired into the daemon's push yet: see docs/weights.md.
"""

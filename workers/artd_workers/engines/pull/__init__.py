"""The direct push, whatever the engine: an engine process pulls weights out of a trainer process's GPU memory.

Purpose: what both sides share (`ring.py`, `checksum.py`, `device.py`) and the engine's side of a push: `session.py` over the
`link.py` to a trainer, whose feeds are `opened.py` or `wire.py`, and their pulls (`pull.py`).
Imports neither an engine nor Megatron-Core. Invariant: only the engine's process ever writes the engine's weights.
"""

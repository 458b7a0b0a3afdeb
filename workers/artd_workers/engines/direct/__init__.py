"""The direct push, whatever the engine: an engine process pulls weights out of a trainer process's GPU memory.

Purpose: what both sides share (`ring.py`, `checksum.py`, `device.py`) and the engine's side of a pull (`session.py`, `pull.py`).
Imports neither vLLM nor Megatron-Core. Invariant: only the engine's process ever writes the engine's weights.
"""

"""The engine worker: a harness that owns one stock inference server and brings committed checkpoints into it.

Purpose: `base.py` is the contract of an engine, one folder per engine holds its adapter and its worker extension.
Owner of: the server's process group, its socket and scratch files. Invariants: see `worker.py` and `push.py`.
"""

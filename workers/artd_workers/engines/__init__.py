"""The engine worker: a harness that runs one stock inference server and brings committed checkpoints into it.

`adapter.py` is the contract of an engine. One folder per engine holds its adapter and its worker extension. The harness owns
the server's process group, its socket and its scratch files.
"""

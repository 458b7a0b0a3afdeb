"""The engine's side of the direct push, for any engine: it copies weights out of a trainer process's GPU memory.

`session.py` is what an engine's worker calls. It holds the `open_offer.py` of one trainer, whose feeds are
`ipc_feed.py` or `nccl_feed.py`, copied by `pull.py` into the engine's tensors, or by `staging.py` into spare memory
first. Nothing here imports an engine's package or Megatron-Core. Only the engine's process ever writes the engine's weights.
"""

"""The trainer's side of the direct push (docs/weights.md).

The six words of a push. *Table*: the tensors that the engine's kernels read, as the engine lists them. *Plan*: which
elements of the trainer's tensors fill which elements of the table. *Offer*: the memory, or the connection, through
which the engine gets the plan's elements. *Slot*: one numbered filling of a buffer of the ring; slot n is in buffer n
modulo the number of buffers. *Copy*: the transfer of a range of bytes into the engine's memory. *Checksum*: the
64-bit sum of a tensor, which the engine compares with the checkpoint's weight table before it serves.

Files: a process serves its `weight_source.py` under a `weight_lock.py`; `checksums.py` sums it for a checkpoint. A
pair with an engine is `pair.py` or `nccl_pair.py`; `layout.py`, `plan.py` and `schedule.py` make its plan, and
`feeder.py` feeds it from `merge_cuda.py` or `merge_cpu.py`. With several processes, each gives its part:
`collectives.py` while no push is under way, `team.py` and `member.py` during pushes. Nothing here imports
Megatron-Core.
"""

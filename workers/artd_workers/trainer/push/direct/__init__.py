"""The trainer's side of the direct push: docs/weights.md.

Purpose: what a process serves (`frozen.py`, `weight_source.py`), what a checkpoint's table says of it (`served.py`), and one pair with
an engine (`pair.py`): its plan (`layout.py`, `plan.py`, `schedule.py`) and what it pulls (`source.py`, `fill.py`, `merge_cuda.py`).
Of several processes each gives its part: `together.py` beside their jobs' steps, `team.py` and `member.py` beside their jobs.
Imports no Megatron-Core.
"""

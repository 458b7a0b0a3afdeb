"""The trainer worker: Megatron-Core GPTModel + LoRA on CPU, durable checkpoints, live pushes.

Purpose: turn (parent checkpoint, packed batch) into the next checkpoint folder, and send committed weights.
Owner of: the resident weights, tagged (run, step, checkpoint sha, fence). Invariants: see `worker.py`.
"""

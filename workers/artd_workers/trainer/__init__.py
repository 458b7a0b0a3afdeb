"""The trainer worker: Megatron-Core's GPTModel with LoRA or every weight trained, durable checkpoints, live pushes.

It turns a parent checkpoint and a packed batch into the next checkpoint folder, and sends committed weights.
"""

"""Model families: one file each, found by the `architectures` entry of a Hugging Face config.

A family says what its config means to Megatron-Core, and lists its weights with names and layouts in one table. Nothing here
imports Megatron. A family refuses by name anything that it does not handle exactly.
"""

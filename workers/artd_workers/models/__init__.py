"""Model families: one file each, found by the `architectures` entry of a Hugging Face config.

Purpose: what a family's config means to Megatron-Core, and one declarative table of its weight names and layouts.
Owner of: no state. Invariants: nothing here imports Megatron; anything a family does not handle exactly is refused by name.
"""

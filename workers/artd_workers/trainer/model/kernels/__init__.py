"""Triton kernels of the trainer's layers."""

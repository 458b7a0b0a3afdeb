"""Weights on their way into vLLM's model, from disk, over gloo or by vLLM's own transfer calls."""

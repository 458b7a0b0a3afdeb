"""What a client sees of sampled tokens, made in vLLM's API server beside its tokenizer and parsers."""

STREAM = "/artd/stream"
"""The route of `middleware`."""

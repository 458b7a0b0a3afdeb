"""Megatron-Core's GPTModel as artd builds it: layers, experts, router replay, logprobs."""

"""What the gateway asks of an engine beside tokens: experts, origins of tokens, arrays."""

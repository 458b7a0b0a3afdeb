"""What vLLM says of each token: the experts it took, and the weights that sampled it."""

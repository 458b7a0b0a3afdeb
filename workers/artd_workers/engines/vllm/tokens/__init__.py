"""What vLLM tells about each token: the experts that the router chose, and the weights that sampled it."""

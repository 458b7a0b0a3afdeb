"""One optimizer step: losses, gradients, update."""

"""The experts of a mixture: grouped weights, routed tokens, router replay, long rows in chunks."""

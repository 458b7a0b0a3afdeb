"""Live pushes: the weights of a committed checkpoint go to the engine."""

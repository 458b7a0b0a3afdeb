"""What artd keeps: trajectories, manifests, and the rules that they obey."""

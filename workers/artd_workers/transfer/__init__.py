"""What trainer and engine share for a push: merge, checksums, coverage, rings, NCCL and gloo."""

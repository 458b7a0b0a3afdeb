"""NCCL between a trainer and an engine: communicators outside torch, streams, and deadlines."""

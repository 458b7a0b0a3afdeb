"""Deletes what is no longer needed: old checkpoints, expired payloads, finished runs."""

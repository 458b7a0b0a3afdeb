"""Checkpoint folders: written, read back, and measured against what was trained."""

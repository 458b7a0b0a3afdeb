"""Checkpoint folders: writes them, reads them back, and measures them against what was trained."""

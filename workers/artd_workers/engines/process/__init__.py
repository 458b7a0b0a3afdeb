"""A server's process: its start, health, progress and end."""

"""A packed batch as the trainer reads it: rows, routes, and which rank trains which row."""

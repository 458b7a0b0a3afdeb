"""A packed batch as the trainer reads it: rows, tree mask, routes, and which rank trains which row."""

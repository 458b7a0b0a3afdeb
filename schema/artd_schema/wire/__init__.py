"""Messages between processes, and the files that take their place."""

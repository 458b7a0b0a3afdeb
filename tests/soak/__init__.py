"""The soak: kills and pauses under load, and a checker of what came of it."""

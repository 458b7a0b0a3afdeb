"""The soak: kills and pauses under load, and a checker of the outcome."""

"""Command-line verbs, one file each."""

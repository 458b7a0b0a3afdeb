"""The verbs of `artd`, one file each."""

"""The verbs of `artctl`, one file each or one for all verbs of a kind."""

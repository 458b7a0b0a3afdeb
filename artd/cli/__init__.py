"""The command line: what its verbs share."""

"""The verbs of `artctl`. Each has a file; similar verbs share one."""

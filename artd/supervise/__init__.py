"""Process supervision: guardians, spawns, back-off, the children's code and environment, and reaping at boot.

Owns the managed children and proofs of their death. A guardian executes a child and does not outlive its subtree. artd
signals a process only after it has opened a pidfd and then read the process's (pid, start ticks) again.
"""

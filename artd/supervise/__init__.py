"""Process supervision: guardians, spawns, back-off, the children's code and environment, and reaping at boot.

Owner of: the managed children and proofs of their death. Invariants: a guardian executes a child and does not outlive its
subtree. artd signals a process only after it has opened a pidfd and then read the process's (pid, start ticks) again.
"""

"""Process supervision: guardians, spawns, back-off, the children's code and environment, and reaping at boot.

Owner of: the managed children and proofs of their death. Invariants: a child is exec'ed by a guardian that does not
outlive its own subtree; a process is signalled only after its (pid, start ticks) were read again behind its pidfd.
"""

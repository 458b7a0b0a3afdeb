"""The packer: trajectories of sealed groups in, one batch of packed rows, its manifest and its replay bundle out.

Owner of: the files of the batch folder it is given. Invariants: numpy and safetensors are imported here and nowhere
else in the daemon's package; everything but `child` is pure; same trajectories + packer version + seed give the same
bytes.
"""

"""The packer: trajectories of sealed groups in, one batch of packed rows, its manifest and its replay bundle out.

Owns the files of the batch folder that it is given. Of the daemon's package only this folder imports numpy and
safetensors. Everything but `child` and the service is pure: the same trajectories, packer version and seed give the
same bytes.
"""

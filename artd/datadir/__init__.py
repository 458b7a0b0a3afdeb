"""The data folder: its owner, its names, its lock, its logs and its free space."""

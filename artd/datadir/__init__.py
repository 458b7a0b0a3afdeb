"""The data folder itself: whose it is, its names, its lock, its logs, its free space."""

"""The database and the blobs: the only state of artd that outlives its processes."""

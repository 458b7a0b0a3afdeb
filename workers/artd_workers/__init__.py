"""Code that runs in the daemon's managed children."""

"""What clients ask of the daemon, and the answers."""

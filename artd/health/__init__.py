"""Signs of life: the heartbeat, its file, and the service manager's notifications."""

"""The daemon's signs of life: the heartbeat, its file, and the notifications for the service manager."""

"""The daemon's sockets: messages in and out, clients of other machines, and how much of all of it at a time."""

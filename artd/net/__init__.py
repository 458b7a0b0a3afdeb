"""The daemon's sockets: they send and receive messages, admit clients of other machines, and limit how much is under way."""

"""What people read of token ids: text, conversations, and what is known of each token. The command line, the client and the daemon use it."""

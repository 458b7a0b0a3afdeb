"""Pure decisions of the daemon: transition tables and functions from committed rows to what happens next."""

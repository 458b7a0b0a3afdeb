"""`artd replay-job`: a committed job done again and compared."""

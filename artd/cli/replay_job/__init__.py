"""`artd replay-job`: does a committed job again and compares the results."""

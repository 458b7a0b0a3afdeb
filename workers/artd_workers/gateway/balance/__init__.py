"""Which of several engines gets a request: the one whose cache holds its prefix, unless that one is overloaded."""

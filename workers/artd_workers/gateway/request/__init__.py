"""One completion request from its body to its reply."""

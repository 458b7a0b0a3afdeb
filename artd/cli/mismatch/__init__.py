"""`artctl mismatch`: engine and trainer score the same tokens."""

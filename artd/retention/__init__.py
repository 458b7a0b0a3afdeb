"""What is deleted, and when: old checkpoints, expired contents, finished runs."""

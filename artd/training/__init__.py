"""Train jobs: ordered, watched, committed, or ended without a step."""

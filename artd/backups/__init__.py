"""Backups: a data folder copied while the daemon runs, and made a data folder again."""

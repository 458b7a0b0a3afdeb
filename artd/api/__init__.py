"""Answers the requests of clients."""

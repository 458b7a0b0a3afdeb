"""Committed steps on their way into the engine, and the gateway's routing table."""

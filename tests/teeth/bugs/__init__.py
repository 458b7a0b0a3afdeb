"""Planted bugs, one module an area."""

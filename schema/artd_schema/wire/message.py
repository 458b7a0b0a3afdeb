"""The base of every message between the daemon and a worker."""

from __future__ import annotations

from msgspec import Struct


class Message(Struct, frozen=True, kw_only=True, tag_field="t", tag=str.lower, omit_defaults=True, gc=False):
    """A message is tagged with the lower-case name of its class."""

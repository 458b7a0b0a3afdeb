"""Names rollouts: the path and the headers by which a request says to which rollout it belongs (docs/adr/0006)."""

from __future__ import annotations

import re

ROOT = "/rollouts/"
"""Below `ROOT + NAME` lies the gateway's whole tree."""
HEADERS = ("x-artd-rollout", "x-session-id")
"""Headers with a rollout's name; the first that a request has counts, and the path before both."""
RETRIES = "x-stainless-retry-count"
"""How often OpenAI's and Anthropic's packages have sent this very request before."""
LONGEST = 200
NAME = re.compile(rf"[A-Za-z0-9][!-.0-~]{{0,{LONGEST - 1}}}")


def name_fault(name: str) -> str:
    """Return what is wrong with a rollout's name, "" when nothing is."""
    if NAME.fullmatch(name):
        return ""
    return (
        f"{name[:LONGEST]!r} is no name of a rollout: use 1 to {LONGEST} printable ASCII characters without spaces and slashes, of which"
        " the first is a letter or a digit"
    )

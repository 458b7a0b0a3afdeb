"""Holds the gateway's deadlines and sizes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Seconds unless said otherwise.

    ready_s: a request for a run that serves nothing waits this long, then 503. hold_s: the same while every engine of
    the run is held. retry_s: how long a request whose engine failed waits for a newer route. label_s: how long a
    response waits for the route that names the weights it came from. ledger_s: deadline of the daemon's
    acknowledgement. call_s: deadline of render, derender and what is asked of routed experts; generate has none, as the
    harness watches the engine.
    head_s: a connection that has sent no whole request head, or no right token, is dropped after this long; heads: as many of those
    there may be. body_s: the longest pause within a request's body.
    read_s: how long a client may leave a part of its stream unread, before its request ends.
    body: bytes. max_message: bytes, all frames of one message to the daemon together.
    """

    ready_s: float = 120.0
    hold_s: float = 300.0
    retry_s: float = 5.0
    label_s: float = 30.0
    ledger_s: float = 60.0
    call_s: float = 60.0
    connect_s: float = 5.0
    head_s: float = 10.0
    heads: int = 128
    body_s: float = 30.0
    read_s: float = 60.0
    retry_after_s: float = 2.0
    body: int = 32 * 2**20
    max_message: int = 64 * 2**20

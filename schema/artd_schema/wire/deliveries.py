"""Messages about the replies of rollouts: how they ended, and which of them no client has (docs/adr/0006)."""

from __future__ import annotations

from .message import Message


class Recalled(Message, frozen=True):
    """Answers Recall. response_id: of the reply, "" when there is none; error: why it cannot be read; bulk frames: its choices' `Turn`s."""

    number: int
    response_id: str = ""
    error: str = ""


class Delivery(Message, frozen=True):
    """Gateway: how the reply of a rollout's response ended. whole: its last byte has left while the client was there."""

    run: str
    response_id: str
    whole: bool


class Recall(Message, frozen=True):
    """Gateway: a client repeats a request, at `place`. Is there a reply that it never had? Answered by Recalled."""

    number: int
    run: str
    rollout: str
    request: str
    place: int

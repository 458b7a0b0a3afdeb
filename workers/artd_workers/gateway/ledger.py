"""Has the daemon write every response to its ledger before the response's last byte leaves.

`record` returns only after the daemon said that the entry is durable. An entry is sent once, because the wire neither loses nor repeats
messages. An acknowledgement that nobody waits for is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from artd_schema.codec import MAGIC
from artd_schema.data.trajectory import RouteShape, Turn
from artd_schema.wire.worker import Exchange, ExchangeAck, FromWorker

from .errors import ApiError
from .limits import Limits

Json = dict[str, Any]
Send = Callable[[FromWorker, Sequence[bytes]], None]


_TOKEN = 8
"""Bytes of a sampled token in an entry: its id and logprob. (A prompt's has an id alone.)"""


def refuse_too_large(
    body: Json, requests: Sequence[Json], shape: RouteShape | None, longest: int, limits: Limits
) -> None:
    """Refuse, before anything is sampled, a request whose answers would not fit the ledger if they were as long as it asks for.

    body: the client's request; requests: as they are generated; shape: of the routes that an entry will have, None = none; longest:
    tokens of prompt and answer together. A request that names no limit of its own passes, because its answers are rarely as long as
    they may be. Raises ApiError 413.
    """
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    asked = limit if isinstance(limit, int) and limit > 0 else 1
    row, size, routed, choices = shape.row_bytes if shape else 0, 0, 0, 0
    asked = min(asked, longest - min(len(request["token_ids"]) for request in requests))
    for request in requests:
        count, prompt = request["sampling_params"].get("n", 1), len(request["token_ids"])
        routed += count * row * (prompt + asked - 1)
        size += count * (4 * prompt + _TOKEN * asked)
        choices += count
    if size + routed > limits.max_message:
        of_them = f" ({routed} of them routed experts)" if routed else ""
        raise ApiError(
            413,
            "ledger_entry_too_large",
            f"{choices} choices of {asked} tokens would make a ledger entry of {size + routed} bytes{of_them} or more, and max_message ="
            f" {limits.max_message}: nothing was sampled; ask for fewer choices or tokens, in several requests, or raise max_message",
        )


class Ledger:
    """Sends exchanges to the daemon and waits for their acknowledgements. Runs in the event loop's thread."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._send = send
        self._limits = limits
        self._waiting: dict[str, asyncio.Future[ExchangeAck]] = {}

    async def record(self, exchange: Exchange, turns: Sequence[Turn]) -> None:
        """Write one response. Raises ApiError 413 (larger than a message may be), 410 (its rollout is closed), 503 (refused, or no
        answer in time)."""
        bulk = [msgspec.msgpack.encode(turn) for turn in turns]
        size = len(MAGIC) + len(msgspec.msgpack.encode(exchange)) + sum(map(len, bulk))
        if size > self._limits.max_message:
            routes = sum(len(turn.routes) for turn in turns)
            of_them = f" ({routes} of them routed experts)" if routes else ""
            raise ApiError(
                413,
                "ledger_entry_too_large",
                f"the response's ledger entry has {size} bytes{of_them}, more than max_message = "
                f"{self._limits.max_message}; ask for fewer choices or tokens ({exchange.choices} choices, "
                f"{exchange.prompt_tokens} + {exchange.completion_tokens} tokens), or raise max_message",
            )
        answer: asyncio.Future[ExchangeAck] = asyncio.get_running_loop().create_future()
        self._waiting[exchange.response_id] = answer
        try:
            self._send(exchange, bulk)
            async with asyncio.timeout(self._limits.ledger_s):
                told = await answer
        except TimeoutError:
            message = f"the daemon did not confirm the ledger entry within {self._limits.ledger_s:.0f} s; try again"
            raise self._unavailable("ledger_timeout", message) from None
        finally:
            del self._waiting[exchange.response_id]
        if told.closed:
            raise ApiError(410, "rollout_closed", told.error)  # no client repeats a 410
        if told.error:
            raise self._unavailable("ledger_refused", f"the daemon did not take the ledger entry: {told.error}")

    def settle(self, ack: ExchangeAck) -> bool:
        """Hand an acknowledgement to the request that waits for it; False when none does any more."""
        answer = self._waiting.get(ack.response_id)
        if answer is None or answer.done():
            return False
        answer.set_result(ack)
        return True

    def _unavailable(self, code: str, message: str) -> ApiError:
        return ApiError(503, code, message, retry_after_s=self._limits.retry_after_s)

"""The gateway's side of the ledger: every response is written by the daemon before its last byte leaves.

Owner of: the acknowledgements being waited for. Invariants: `record` returns only after the daemon said that the entry
is durable; an entry is sent once (the wire neither loses nor repeats), and an acknowledgement that nobody waits for is
dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import msgspec

from artd_schema.codec import MAGIC
from artd_schema.trajectory import Turn
from artd_schema.worker import Exchange, ExchangeAck, FromWorker

from .errors import ApiError
from .limits import Limits

Send = Callable[[FromWorker, Sequence[bytes]], None]


class Ledger:
    """Sends exchanges to the daemon and waits for their acknowledgements. Runs in the event loop's thread."""

    def __init__(self, send: Send, limits: Limits) -> None:
        self._send = send
        self._limits = limits
        self._waiting: dict[str, asyncio.Future[str]] = {}

    async def record(self, exchange: Exchange, turns: Sequence[Turn]) -> None:
        """Write one response. Errors: ApiError 413 (larger than a message may be), 503 (refused, or no answer in
        time)."""
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
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[exchange.response_id] = answer
        try:
            self._send(exchange, bulk)
            async with asyncio.timeout(self._limits.ledger_s):
                error = await answer
        except TimeoutError:
            message = f"the daemon did not confirm the ledger entry within {self._limits.ledger_s:.0f} s; try again"
            raise self._unavailable("ledger_timeout", message) from None
        finally:
            del self._waiting[exchange.response_id]
        if error:
            raise self._unavailable("ledger_refused", f"the daemon did not take the ledger entry: {error}")

    def settle(self, ack: ExchangeAck) -> bool:
        """Hand an acknowledgement to who waits for it; False when nobody does any more."""
        answer = self._waiting.get(ack.response_id)
        if answer is None or answer.done():
            return False
        answer.set_result(ack.error)
        return True

    def _unavailable(self, code: str, message: str) -> ApiError:
        return ApiError(503, code, message, retry_after_s=self._limits.retry_after_s)

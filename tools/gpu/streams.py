"""Streamed chat completions through artd's gateway: `--streams N` of `tools.gpu.loop`."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

TOKENS = 128


async def measure(run: Any, openai: Any, count: int) -> dict[str, Any]:
    """Stream `count` answers beside each other, and one alone that is compared with the same answer in one piece.

    Every stream is then submitted by its id, so the ledger had it before its closing event. Returns medians in seconds.
    """
    whole, again = [(await openai.chat.completions.create(**_asked(0))).choices[0].message.content for _ in range(2)]
    alone = await _stream(openai, 0)
    began = time.monotonic()
    found = await asyncio.gather(*(_stream(openai, seed) for seed in range(1, count + 1)))
    seconds = time.monotonic() - began
    for one in (alone, *found):
        await run.submit(one["id"], 0.0, responses=[one["id"]])
    return {
        "streams": count, "tokens": sum(one["tokens"] for one in found), "seconds": round(seconds, 3),
        # vLLM 0.25 decodes a whole answer without its prompt, so some tokenizers lose the space before its first word.
        "same_as_whole": alone["text"].strip() == whole.strip(), "whole_twice_same": whole == again,
        "first_s": {"alone": alone["first_s"], "median": _median(found, "first_s")},
        "between_s": {"alone": alone["between_s"], "median": _median(found, "between_s")},
        "chunks": {"alone": alone["chunks"], "median": _median(found, "chunks")},
        "finish": sorted({one["finish"] for one in found}),
    }  # fmt: skip


def _asked(seed: int) -> dict[str, Any]:
    said = [{"role": "user", "content": f"Count to {seed + 10}."}]
    more = {"ignore_eos": True}
    return {
        "model": "run",
        "messages": said,
        "max_tokens": TOKENS,
        "temperature": 1.0,
        "seed": seed,
        "extra_body": more,
    }


async def _stream(openai: Any, seed: int) -> dict[str, Any]:
    began = time.monotonic()
    stream = await openai.chat.completions.create(**_asked(seed), stream=True, stream_options={"include_usage": True})
    times, text, finish, tokens, name = [], "", "", 0, ""
    async for chunk in stream:
        name = chunk.id
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        for choice in chunk.choices:
            text, finish = text + (choice.delta.content or ""), choice.finish_reason or finish
            times.append(time.monotonic())
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    return {"id": name, "text": text, "finish": finish, "tokens": tokens, "chunks": len(times),
            "first_s": round(times[0] - began, 4), "between_s": round(statistics.median(gaps), 5)}  # fmt: skip


def _median(found: list[dict[str, Any]], name: str) -> float:
    return statistics.median(one[name] for one in found)

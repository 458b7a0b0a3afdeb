"""The loop of a rollout program: ask the gateway, submit by value and by reference, write down every promise.

A key and its content are written down before they are sent, an answer before anything else is done. After a death the next
process first submits again what was meant and not answered.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from artd_client import ArtdError, Conflict, Invalid, NotFound, turn
from artd_client.run import Run
from artd_schema.codec import digest
from artd_schema.data.trajectory import Turn

from .journal import Acked, Broken, Journal, Meant, Replied, read

LARGE = 70_000  # bytes: more than a row takes
AGAIN_S = 0.05
MEMBERS = 3  # trajectories of a group


class Load:
    """name: of this client, part of every key; vocab: of the model; verified: whether the weights that a reply's tokens
    name were told to be live (None: the engine does not sign)."""

    def __init__(
        self, name: str, journal: Journal, vocab: int, verified: Callable[[tuple[int, ...]], bool] | None
    ) -> None:
        self.name = name
        self._journal = journal
        self._vocab = vocab
        self._verified = verified
        self._meant: dict[str, Meant] = {}
        self._acked: set[str] = set()
        for line in read(journal.path):
            if isinstance(line, Meant):
                self._meant[line.key] = line
            elif isinstance(line, Acked):
                self._acked.add(line.key)

    @property
    def begun(self) -> str:
        """The group that was begun and is not whole, or ""."""
        whole = Counter(self._meant[key].group for key in self._acked)
        return next((meant.group for meant in self._meant.values() if whole[meant.group] < MEMBERS), "")

    async def group(self, run: Run, web: httpx.AsyncClient | None) -> str:
        """Submit one group: a small and a large trajectory by value, and one by reference (without `web`: by value too). A
        group that was begun before is finished instead. Returns its name."""
        name = self.begun or f"{self.name}-{len({meant.group for meant in self._meant.values()})}"
        await asyncio.gather(*(self._member(run, web, name, number) for number in range(MEMBERS)))
        return name

    async def _member(self, run: Run, web: httpx.AsyncClient | None, group: str, number: int) -> None:
        key = f"{group}-{number}"
        if key in self._acked:
            return
        meant = self._meant.get(key)
        turns = [self._turn(key, LARGE if number == 1 else 0)] if number < 2 or web is None else []
        if meant is None:
            refs = () if turns or web is None else (await self.ask(run, web, f"/rollouts/{key}"),)
            body = digest(msgspec.msgpack.encode(turns)) if turns else ""
            meant = Meant(key=key, group=group, reward=float(number), digest=body, refs=refs)
            self._meant[key] = meant
            self._journal.write(meant)
        await self._submit(run, meant, () if meant.refs else turns)

    async def _submit(self, run: Run, meant: Meant, turns: Any) -> None:
        while True:
            try:
                answer = await run.submit(
                    meant.group,
                    meant.reward,
                    rollout="" if turns else meant.key,
                    turns=turns,
                    key=meant.key,
                    metadata={"by": self.name},
                )
            except (Conflict, NotFound, Invalid) as error:
                self._journal.write(Broken(what=f"submit of {meant.key}: {type(error).__name__}: {error.message}"))
                raise
            except ArtdError:
                await asyncio.sleep(AGAIN_S)  # not running, busy, draining, too late: the same again
                continue
            self._journal.write(Acked(key=meant.key, trajectory=answer.trajectory, at=time.time()))
            self._acked.add(meant.key)
            return

    def _turn(self, key: str, size: int) -> Turn:
        seed = int(digest(key.encode())[:8], 16)
        ids = [(seed >> shift) % self._vocab for shift in (0, 8, 16, 24)]
        return turn([5, 6, 7], ids, [-1.0] * 4, raw=key.encode().ljust(size, b"."))

    async def ask(self, run: Run, web: httpx.AsyncClient, below: str = "") -> str:
        """Write down one reply of the newest step that is served, and return its id. below: the path of a rollout; what is asked again is
        a repetition then, as the packages of OpenAI and Anthropic say it."""
        body = {
            "model": run.model, "messages": [{"role": "user", "content": "Say."}], "max_tokens": 40,
            "return_token_ids": True,
        }  # fmt: skip
        for attempt in itertools.count():
            try:
                headers = {"authorization": f"Bearer {run.api_key}", "x-stainless-retry-count": f"{attempt}"}
                root = run.base_url.removesuffix("/v1")
                answer = await web.post(f"{root}{below}/v1/chat/completions", json=body, headers=headers)
                if answer.status_code == 200:
                    return self._replied(answer.json())
                if answer.status_code not in (404, 409, 429, 502, 503):
                    raise AssertionError(f"the gateway answered {answer.status_code}: {answer.text}")
            except httpx.HTTPError:
                await self._refreshed(run)  # the gateway may have another address now
            await asyncio.sleep(AGAIN_S)
        raise AssertionError("it is asked until there is an answer")

    async def _refreshed(self, run: Run) -> None:
        try:
            await run.refresh()
        except ArtdError:
            await asyncio.sleep(AGAIN_S)

    def _replied(self, answer: Any) -> str:
        message = answer["choices"][0]["message"]
        tokens = tuple(message["generation_token_ids"])
        self._journal.write(
            Replied(
                response=answer["id"], model=answer["model"], prompt=tuple(message["prompt_token_ids"]), tokens=tokens,
                logprobs=tuple(message["generation_log_probs"]), at=time.time(),
                verified=None if self._verified is None else self._verified(tokens),
            )
        )  # fmt: skip
        return str(answer["id"])

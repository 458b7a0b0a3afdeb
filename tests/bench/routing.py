"""Which engine the gateway sends requests to: how evenly 16 engines are loaded, how many prefixes they have cached, and what a choice costs.

    python tests/bench/routing.py [--json] [--groups 192]

The fleet is scripted: 256 rollouts are under way, of groups of eight that share a prompt behind a common system prompt, with 3 to 14 turns each and
tools that take up to 4 s. An engine's time is that of its prefill and of its batch's decode. Time is simulated; the choices are the gateway's own. The
best possible are the hits of one cache that all engines share. Goals: imbalance at most 10 %, hits at least 95 % of the best possible; two engines
behind a real gateway, which cache what they are asked, hit as much; at most 0.2 ms a request.
"""

from __future__ import annotations

import asyncio
import heapq
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
from artd_workers.gateway.balance.balance import Balance, Work
from artd_workers.gateway.balance.prefixes import BLOCK, Cache, Prefix
from tests.bench.report import Report, parser
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import Rig, merged

ENGINES, SLOTS, GROUP = 16, 256, 8
SYSTEM = 600
PREFILL_S, TOKEN_S, CROWD_S = 1 / 20_000, 0.010, 0.0004
"""Of a prompt's token, of an answer's, and of an answer's for each other request that the engine generates."""


@dataclass
class Rollout:
    tokens: list[int]
    turns: int


@dataclass
class Engine:
    """A scripted engine. blocks: what its cache holds; work: tokens that it has computed."""

    cache: Cache
    blocks: set[int] = field(default_factory=set)
    running: int = 0
    work: int = 0

    def hit(self, prefix: Prefix) -> int:
        """Return the tokens of a prompt that need no prefill."""
        missed = next((i for i, block in enumerate(prefix.hashes) if block not in self.blocks), len(prefix.hashes))
        return missed * BLOCK


class Fleet:
    """Rollouts on a simulated clock. hits, possible: tokens of prompts that were cached where they went, and anywhere."""

    def __init__(self, seed: int, groups: int) -> None:
        self._rng = random.Random(seed)
        self._balance = Balance()
        self.engines = {(f"/e{number}", 0): Engine((f"/e{number}", 0)) for number in range(ENGINES)}
        self._everywhere: set[int] = set()
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._left = self._script(groups)
        self.hits = self.possible = 0

    def _script(self, groups: int) -> list[Rollout]:
        system, found = self._text(SYSTEM), []
        for _ in range(groups):
            prompt = system + self._text(self._rng.randint(100, 1500))
            found += [Rollout(list(prompt), self._rng.randint(3, 14)) for _ in range(GROUP)]
        return found[::-1]

    def _text(self, tokens: int) -> list[int]:
        return [self._rng.randrange(1 << 20) for _ in range(tokens)]

    def run(self) -> None:
        """Play until no rollout is left to begin: then engines run dry, whoever chooses."""
        for slot in range(SLOTS):
            self._next(slot * 0.01)
        while self._left:
            at, _, act = heapq.heappop(self._events)
            act(at)

    def _at(self, when: float, act: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (when, self._rng.randrange(1 << 60), act))

    def _next(self, now: float) -> None:
        if self._left:
            rollout = self._left.pop()
            self._at(now, lambda at: self._ask(at, rollout))

    def _ask(self, now: float, rollout: Rollout) -> None:
        prefix = Prefix().extend(rollout.tokens)
        work = Work(prefix, prefix.tokens)
        engine = self.engines[self._balance.choose(work, list(self.engines))]
        added = self._balance.enter(work, engine.cache)
        hit = engine.hit(prefix)
        self.hits += hit
        self.possible += sum(block in self._everywhere for block in prefix.hashes) * BLOCK
        answer = self._text(max(8, int(self._rng.lognormvariate(5.0, 0.8))))
        engine.running += 1
        engine.work += prefix.tokens - hit + len(answer)
        for blocks in (engine.blocks, self._everywhere):
            blocks.update(prefix.hashes)
        seconds = (prefix.tokens - hit) * PREFILL_S + len(answer) * (TOKEN_S + CROWD_S * engine.running)

        def done(at: float) -> None:
            engine.running -= 1
            self._balance.learn(work, engine.cache, [answer])
            self._balance.leave(engine.cache[0], added)
            for blocks in (engine.blocks, self._everywhere):
                blocks.update(prefix.extend(answer).hashes)
            rollout.turns -= 1
            if not rollout.turns:
                return self._next(at)
            rollout.tokens += answer + self._text(self._rng.randint(20, 600))
            return self._at(at + self._rng.uniform(0.2, 4.0), lambda when: self._ask(when, rollout))

        self._at(now + seconds, done)


def imbalance(loads: Sequence[float]) -> float:
    """Return by how much the largest load exceeds the mean, as a part of it."""
    return max(loads) / statistics.mean(loads) - 1


def play(groups: int, report: Report) -> None:
    """Measure the scripted fleet; the worst of three seeds counts."""
    fleets = [Fleet(seed, groups) for seed in range(3)]
    for fleet in fleets:
        fleet.run()
    worst = max(imbalance([engine.work for engine in fleet.engines.values()]) for fleet in fleets)
    report.add("16 engines: tokens of the busiest over the mean", worst, "", 0.10, "<=")
    report.add("16 engines: prefix hits of the best possible", min(f.hits / f.possible for f in fleets), "", 0.95)


async def ask_two(report: Report) -> None:
    """Two engines behind a gateway: eight rollouts of six turns beside each other."""
    with tempfile.TemporaryDirectory() as folder:
        async with AsyncExitStack() as stack:
            rig = Rig(stack, Path(folder))
            await rig.start()
            engines = [await rig.engine(f"e{number}", max_model_len=100_000) for number in range(2)]
            await rig.daemon.route(*(merged(e, 3, 4, name=f"e{n}") for n, e in enumerate(engines)))

            async def roll(name: str) -> None:
                messages = [{"role": "user", "content": name * 400}]
                for _ in range(6):
                    answer = (await rig.chat(messages=messages)).json()["choices"][0]["message"]["content"]
                    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": name * 60}]

            await asyncio.gather(*(roll(name) for name in "abcdefgh"))
            report.add("2 engines: prefix hits of the best possible", hits_of(engines), "", 0.95)
            report.add("2 engines: requests of the busier over the mean", imbalance([
                len(engine.bodies("/generate")) for engine in engines]), "", 0.10, "<=")  # fmt: skip


def hits_of(engines: Sequence[FakeEngine]) -> float:
    """Return the blocks that were cached where they were asked for, as a part of those that one cache would have had. Rollouts share nothing here,
    so the order among engines makes no difference."""
    total = possible = 0
    rollouts: dict[int, list[tuple[int, ...]]] = {}
    for engine in engines:
        seen: set[int] = set()
        for body in engine.bodies("/generate"):
            hashes = Prefix().extend(body["token_ids"]).hashes
            rollouts.setdefault(hashes[0], []).append(hashes)
            total += sum(block in seen for block in hashes)
            seen.update(hashes)
    for turns in rollouts.values():
        known: set[int] = set()
        for hashes in sorted(turns, key=len):
            possible += sum(block in known for block in hashes)
            known.update(hashes)
    return total / possible


def cost_ms(tokens: int, engines: int = ENGINES) -> float:
    """Return the median milliseconds of the gateway's CPU that the choice costs a request of so many tokens, and its answer of 200."""
    balance, rng, took = Balance(), random.Random(1), []
    caches = [(f"/e{number}", 0) for number in range(engines)]
    for _ in range(200):
        prompt, answer = ([rng.randrange(150_000) for _ in range(count)] for count in (tokens, 200))
        started = time.thread_time()
        work = Work(Prefix().extend(prompt), tokens)
        cache = balance.choose(work, caches)
        added = balance.enter(work, cache)
        balance.learn(work, cache, [answer])
        balance.leave(cache[0], added)
        took.append(1000 * (time.thread_time() - started))
    return statistics.median(took)


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--groups", type=int, default=192)
    args = options.parse_args()
    report = Report(f"routing, {args.groups} groups of {GROUP} rollouts on {ENGINES} engines")
    play(args.groups, report)
    asyncio.run(ask_two(report))
    report.add("a choice among 16, prompt of 2,000 tokens", cost_ms(2_000), "ms", 0.2, "<=")
    report.add("a choice among 16, prompt of 8,000 tokens", cost_ms(8_000), "ms", 0.2, "<=")
    report.add("a choice among 16, prompt of 32,000 tokens", cost_ms(32_000), "ms")
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())

"""What a request and a chunk of a stream cost the gateway: its own CPU time, beside a scripted engine in a process of its own.

    python tests/bench/gateway.py [--json] [--requests 600]

The ledger acknowledges at once: its fsync is the daemon's. A request is three upstream calls (render, generate, derender), a stream two. Goals: 400
requests and 5,000 chunks for each second of the gateway's CPU; a chunk reaches the client within 10 ms of the engine's.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.bench.report import Report, parser
from tests.gateway.fake_engine import FakeEngine
from tests.gateway.rig import TOKEN, Rig, merged

CLIENTS = 16
CHUNKS = 400
STEP_S = 0.02
BODY = {"model": "pol", "messages": [{"role": "user", "content": "Capital of France? " * 20}]}


class BenchEngine(FakeEngine):
    """Says `Paris$`; streams say CHUNKS tokens, one a chunk. `slow`: STEP_S before each."""

    async def _events(self, body: Any) -> Any:
        self.texts = ["x" * CHUNKS]
        self.chunk = 1
        self.step = (lambda: asyncio.sleep(STEP_S)) if body["generate"]["sampling_params"].get("seed") == 7 else None
        async for event in super()._events(body):
            yield event | {"at": time.time()}
        self.texts = ["Paris$"]


async def serve(socket: str) -> None:
    """Run a gateway before the engine at this socket; print its address. The daemon is the tests' own, which acknowledges at once."""
    async with AsyncExitStack() as stack:
        rig = Rig(stack, Path(socket).parent)
        await rig.start()
        engine = FakeEngine(socket, max_model_len=100_000)
        await rig.daemon.route(merged(engine, 3, 4))
        print(rig.url, flush=True)
        while True:
            await asyncio.sleep(1)
            rig.daemon.ledger.clear()
            rig.daemon.sent.clear()


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def requests(http: httpx.AsyncClient, count: int) -> None:
    left = iter(range(count))

    async def ask() -> None:
        for _ in left:
            assert (await http.post("/v1/chat/completions", json=BODY)).status_code == 200

    await asyncio.gather(*(ask() for _ in range(CLIENTS)))


async def streams(http: httpx.AsyncClient, count: int) -> int:
    """Return how many chunks came."""
    seen = 0

    async def ask() -> None:
        nonlocal seen
        async with http.stream("POST", "/v1/chat/completions", json=BODY | {"stream": True}) as response:
            async for line in response.aiter_lines():
                seen += line.startswith("data: {")

    for _ in range(count // CLIENTS):
        await asyncio.gather(*(ask() for _ in range(CLIENTS)))
    return seen


async def gaps(http: httpx.AsyncClient) -> list[float]:
    """Milliseconds by which the client has chunks later than STEP_S apart, of one slow stream."""
    found, last = [], 0.0
    async with http.stream(
        "POST", "/v1/chat/completions", json=BODY | {"stream": True, "seed": 7, "max_tokens": 100}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["delta"].get("content"):
                now = time.perf_counter()
                if last:
                    found.append(1000 * (now - last - STEP_S))
                last = now
    return found


async def measure(url: str, gateway: int, count: int, report: Report) -> None:
    async with httpx.AsyncClient(
        base_url=url, headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False, timeout=120,
        limits=httpx.Limits(max_connections=CLIENTS),
    ) as http:  # fmt: skip
        await requests(http, 50)
        before = cpu_s(gateway)
        await requests(http, count)
        report.add("requests a second of its CPU", count / (cpu_s(gateway) - before), "1/s", 400)
        before = cpu_s(gateway)
        chunks = await streams(http, 3 * CLIENTS)
        report.add("chunks a second of its CPU", chunks / (cpu_s(gateway) - before), "1/s", 5000)
        report.add("a chunk's delay, median", statistics.median(await gaps(http)), "ms", 10, "<=")


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=600)
    options.add_argument(
        "--part", choices=("engine", "gateway"), help="what this process is (for the benchmark itself)"
    )
    options.add_argument("--socket")
    args = options.parse_args()
    if args.part == "engine":
        BenchEngine(args.socket, max_model_len=100_000).server.run()
        return 0
    if args.part == "gateway":
        asyncio.run(serve(args.socket))
    report = Report(f"the gateway, {args.requests} requests of {CLIENTS} clients, streams of {CHUNKS} chunks")
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--socket", f"{folder}/e0", "--part"]
        engine = subprocess.Popen([*command, "engine"])
        gateway = subprocess.Popen([*command, "gateway"], stdout=subprocess.PIPE, text=True)
        try:
            assert gateway.stdout is not None
            url = gateway.stdout.readline().strip()
            while not Path(f"{folder}/e0").exists():
                time.sleep(0.05)
            asyncio.run(measure(url, gateway.pid, args.requests, report))
        finally:
            engine.kill()
            gateway.kill()
    return report.finish(args.json)


if __name__ == "__main__":
    sys.exit(main())

"""Packing speed, fill and tokens saved on a fixed mix: `python -m tests.bench.pack [--json]`.

128 groups of 8; prompts of 128 to 1023 tokens, completions of 128 to 1535, uniform; rows of 8,192. Tokens are those of
the trajectories (logical). Timed on one core: msgpack bodies to tensors, digests and safetensors bytes. `child` is the
whole exec'ed process on a real SQLite file: start, imports, read and verify, pack, write, fsync. `replay`: 32 such groups
with the routes of 48 layers, top 8 of 128 experts (384 bytes a token), and the replay bundle that they become; the fourth
part of the groups has siblings that were routed otherwise from the middle of the prompt on.
"""

from __future__ import annotations

import hashlib
import os
import resource
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from artd.packing.batch import PackSpec, Source, fill, pack
from artd.packing.child import PackRequest, PackResult
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import RouteShape, Turn
from tests.bench.report import Report, parser

ROOT = Path(__file__).parents[2]
SPEC = PackSpec(run="bench", step=1, seed=0, row_length=8192, scale_rewards=True, base_digest="bench")
SHAPE = RouteShape(layers=48, topk=8, experts=128)
REPLAY = msgspec.structs.replace(SPEC, routes=SHAPE)


def mix(groups: int = 128, size: int = 8, seed: int = 0, shape: RouteShape | None = None) -> list[Source]:
    rng = np.random.default_rng(seed)
    captured = Captured(shape) if shape else None
    sources = []
    for group in range(groups):
        prompt = rng.integers(0, 49152, rng.integers(128, 1024), dtype=np.int32).tobytes()
        for member in range(size):
            sampled = rng.integers(0, 49152, rng.integers(128, 1536), dtype=np.int32)
            turn = Turn(
                prompt_ids=prompt,
                token_ids=sampled.tobytes(),
                logprobs=(-rng.random(len(sampled), dtype=np.float32)).tobytes(),
                policy_epoch=((0, 1), (len(sampled) // 2, 2)),
                routes=captured.of(group, member, len(prompt) // 4, len(sampled) - 1) if captured else b"",
            )
            body = msgspec.msgpack.encode([turn])
            sources.append(Source(len(sources) + 1, group, float(rng.random()), digest(body), body))
    return sources


class Captured:
    """Made-up routes: of each token and layer one of 4,096 ways to choose `topk` experts."""

    def __init__(self, shape: RouteShape) -> None:
        self._rng = np.random.default_rng(1)
        self._layers = shape.layers
        ways = [self._rng.permutation(shape.experts)[: shape.topk] for _ in range(4096)]
        self._ways = np.array(ways, np.uint8)

    def of(self, group: int, member: int, prompt: int, sampled: int) -> bytes:
        """Rows of a prompt, which siblings have in common, and of what was sampled after it."""
        first = np.random.default_rng(group).integers(0, 4096, (prompt, self._layers))
        if group % 4 == 0 and member % 2:
            first[prompt // 2, self._layers // 2] ^= 1
        then = self._rng.integers(0, 4096, (sampled, self._layers))
        return self._ways[np.concatenate((first, then))].tobytes()


@dataclass
class Rounds:
    """Medians of a few packings. manifest: of each the same, or SystemExit."""

    seconds: float
    busy: float
    manifest: BatchManifest


def measure(spec: PackSpec, sources: list[Source], rounds: int) -> Rounds:
    seen = [once(spec, sources) for _ in range(rounds)]
    if len({found for _, _, _, found in seen}) != 1:
        raise SystemExit(f"the packer is not deterministic: {rounds} rounds gave different bytes")
    walls, processors = zip(*((wall, busy) for wall, busy, _, _ in seen), strict=True)
    return Rounds(statistics.median(walls), statistics.median(processors), seen[0][2])


def once(spec: PackSpec, sources: list[Source]) -> tuple[float, float, BatchManifest, str]:
    """Wall seconds, processor seconds, manifest and digest of the files for one packing."""
    start, busy = time.perf_counter(), time.process_time()
    tensors, manifest, replay = pack(spec, sources)
    found = hashlib.sha256(serialise(tensors)).hexdigest() + digest(to_json(manifest))
    if replay:
        found += hashlib.sha256(serialise(replay.tensors)).hexdigest() + digest(to_json(replay.manifest))
    return time.perf_counter() - start, time.process_time() - busy, manifest, found


def child(spec: PackSpec, sources: list[Source], folder: Path) -> tuple[float, PackResult]:
    """Seconds and answer of the packer's process on a store with these trajectories."""
    db = folder / "bench.db"
    with sqlite3.connect(db) as connection:
        connection.execute("CREATE TABLE trajectory (id INTEGER PRIMARY KEY, group_id, reward, digest, blob TEXT)")
        connection.execute("CREATE TABLE trajectory_data (trajectory_id INTEGER PRIMARY KEY, body BLOB)")
        rows = [(s.id, s.group, s.reward, s.digest) for s in sources]
        connection.executemany("INSERT INTO trajectory VALUES (?, ?, ?, ?, NULL)", rows)
        connection.executemany("INSERT INTO trajectory_data VALUES (?, ?)", [(s.id, s.body) for s in sources])
    connection.close()
    request = PackRequest(
        **msgspec.structs.asdict(spec),
        db=str(db),
        blobs_dir=str(folder),
        trajectory_ids=[s.id for s in sources],
        out_dir=str(folder / "out"),
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "schema")])}
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "artd.packing.child"],
        input=msgspec.json.encode(request),
        stdout=subprocess.PIPE,
        env=environment,
        check=True,
    )
    return time.perf_counter() - start, msgspec.json.decode(done.stdout, type=PackResult)


def main() -> int:
    arguments = parser(__doc__).parse_args()
    report = Report("packing: 1,024 sequences in 128 groups of 8, rows of 8,192, one core")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    dense(report)
    replayed(report)
    return report.finish(arguments.json)


def dense(report: Report) -> None:
    sources = mix()
    found = measure(SPEC, sources, 5)
    manifest = found.manifest
    with tempfile.TemporaryDirectory() as folder:
        child_seconds, answer = child(SPEC, sources, Path(folder))
    report.add("speed, logical tokens", manifest.logical_tokens / found.seconds, "tokens/s", 1e6)
    report.add("speed per processor second, logical tokens", manifest.logical_tokens / found.busy, "tokens/s")
    report.add("speed, physical tokens", manifest.physical_tokens / found.seconds, "tokens/s")
    report.add("fill", fill(manifest), "share", 0.97)
    report.add("logical tokens", manifest.logical_tokens, "tokens")
    report.add("tokens saved by prefix sharing", manifest.logical_tokens - manifest.physical_tokens, "tokens")
    report.add("share saved", 1 - manifest.physical_tokens / manifest.logical_tokens, "share")
    report.add("rows", manifest.rows, "rows")
    report.add("child: start to answer", child_seconds, "s")
    report.add("child: speed, logical tokens", answer.logical_tokens / child_seconds, "tokens/s")


def replayed(report: Report) -> None:
    sources = mix(32, shape=SHAPE)
    found = measure(REPLAY, sources, 3)
    manifest = found.manifest
    with tempfile.TemporaryDirectory() as folder:
        child_seconds, answer = child(REPLAY, sources, Path(folder))
    assert answer.replay is not None
    report.add("replay: speed, logical tokens", manifest.logical_tokens / found.seconds, "tokens/s")
    report.add("replay: speed per processor second", manifest.logical_tokens / found.busy, "tokens/s")
    report.add("replay: logical tokens", manifest.logical_tokens, "tokens")
    report.add("replay: share saved", 1 - manifest.physical_tokens / manifest.logical_tokens, "share")
    report.add("replay: tokens unshared for other routes", manifest.unshared_tokens, "tokens")
    report.add("replay: bundle", answer.replay.bytes / 2**20, "MiB")
    report.add("replay: covered", answer.covered / answer.physical_tokens, "share")
    report.add("replay: child, start to answer", child_seconds, "s")
    report.add("replay: child, peak memory", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10, "MiB")


if __name__ == "__main__":
    sys.exit(main())

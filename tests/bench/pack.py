"""Packing speed, fill and tokens saved on a fixed mix: `python -m tests.bench.pack [--json]`.

128 groups of 8; prompts of 128 to 1023 tokens, completions of 128 to 1535, uniform; rows of 8,192. Tokens are those of
the trajectories (logical). Timed on one core: msgpack bodies to tensors, digests and safetensors bytes. `child` is the
whole exec'ed process on a real SQLite file: start, imports, read and verify, pack, write, fsync.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import numpy as np

from artd.packing.child import PackRequest, PackResult
from artd.packing.manifest import PackSpec, Source, fill, pack
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.manifest import BatchManifest
from artd_schema.trajectory import Turn
from tests.bench.report import Report, parser

ROOT = Path(__file__).parents[2]
SPEC = PackSpec(run="bench", step=1, seed=0, row_length=8192, scale_rewards=True, base_digest="bench")


def mix(groups: int = 128, size: int = 8, seed: int = 0) -> list[Source]:
    rng = np.random.default_rng(seed)
    sources = []
    for group in range(groups):
        prompt = rng.integers(0, 49152, rng.integers(128, 1024), dtype=np.int32).tobytes()
        for _ in range(size):
            sampled = rng.integers(0, 49152, rng.integers(128, 1536), dtype=np.int32)
            turn = Turn(
                prompt_ids=prompt,
                token_ids=sampled.tobytes(),
                logprobs=(-rng.random(len(sampled), dtype=np.float32)).tobytes(),
                policy_epoch=((0, 1), (len(sampled) // 2, 2)),
            )
            body = msgspec.msgpack.encode([turn])
            sources.append(Source(len(sources) + 1, group, float(rng.random()), digest(body), body))
    return sources


def once(sources: list[Source]) -> tuple[float, float, BatchManifest, str]:
    """Wall seconds, processor seconds, manifest and digest of the files for one packing."""
    start, busy = time.perf_counter(), time.process_time()
    tensors, manifest = pack(SPEC, sources)
    found = hashlib.sha256(serialise(tensors)).hexdigest() + digest(to_json(manifest))
    return time.perf_counter() - start, time.process_time() - busy, manifest, found


def child(sources: list[Source], folder: Path) -> tuple[float, PackResult]:
    """Seconds and answer of the packer's process on a store with these trajectories."""
    db = folder / "bench.db"
    with sqlite3.connect(db) as connection:
        connection.execute(
            "CREATE TABLE trajectory (id INTEGER PRIMARY KEY, group_id, reward, digest, body BLOB, blob TEXT)"
        )
        rows = [(s.id, s.group, s.reward, s.digest, s.body) for s in sources]
        connection.executemany("INSERT INTO trajectory VALUES (?, ?, ?, ?, ?, NULL)", rows)
    connection.close()
    request = PackRequest(
        **msgspec.structs.asdict(SPEC),
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
    sources = mix()
    rounds = [once(sources) for _ in range(5)]
    seconds = statistics.median(wall for wall, _, _, _ in rounds)
    busy = statistics.median(processor for _, processor, _, _ in rounds)
    manifest = rounds[0][2]
    if len({found for _, _, _, found in rounds}) != 1:
        raise SystemExit("the packer is not deterministic: five rounds gave different bytes")
    with tempfile.TemporaryDirectory() as folder:
        child_seconds, answer = child(sources, Path(folder))
    report.add("speed, logical tokens", manifest.logical_tokens / seconds, "tokens/s", 1e6)
    report.add("speed per processor second, logical tokens", manifest.logical_tokens / busy, "tokens/s")
    report.add("speed, physical tokens", manifest.physical_tokens / seconds, "tokens/s")
    report.add("fill", fill(manifest), "share", 0.97)
    report.add("logical tokens", manifest.logical_tokens, "tokens")
    report.add("tokens saved by prefix sharing", manifest.logical_tokens - manifest.physical_tokens, "tokens")
    report.add("share saved", 1 - manifest.physical_tokens / manifest.logical_tokens, "share")
    report.add("rows", manifest.rows, "rows")
    report.add("child: start to answer", child_seconds, "s")
    report.add("child: speed, logical tokens", answer.logical_tokens / child_seconds, "tokens/s")
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main())

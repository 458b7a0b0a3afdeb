"""Start and stop the other ranks of a trainer. The trainer's own process is rank 0.

`start_ranks` runs ranks 1 and up through torchrun, and ends them when its block ends. It owns the torchrun process
and the folder in which the ranks meet. Nothing listens beyond loopback: ranks and torchrun meet in files, and gloo
and NCCL stay on `lo`. When one rank dies, all die: rank 0 watches each process, and the other ranks watch their
standard input, whose other end rank 0 holds.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import torch

from artd_schema.run.spec import RunSpec
from artd_workers.trainer import placement

from .layout import Parallel
from .ranks import Ranks, join_ranks

PEER = "artd_workers.trainer.peer"
_END_S = 5.0


def layout(spec: RunSpec) -> Parallel:
    """Return a run's layout. Raises ValueError when this machine cannot run it."""
    parallel = Parallel.of(spec)
    if placement.device_of(spec) == "cuda" and torch.cuda.device_count() < parallel.world:
        raise ValueError(
            f"the run takes {parallel.world} GPUs for its trainer, and torch sees {torch.cuda.device_count()}: start artd "
            "where there are as many, or a run with lower sizes trainer.*_parallel"
        )
    return parallel


@contextmanager
def start_ranks(parallel: Parallel, cuda: bool) -> Iterator[Ranks]:
    """Start the ranks of a layout, with this process as rank 0. The others end when the block ends."""
    if parallel.world == 1:
        yield Ranks()
        return
    folder = Path(tempfile.mkdtemp(prefix="ranks-"))
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # its server would listen on every interface
    process = subprocess.Popen(torchrun(parallel, folder, cuda), stdin=subprocess.PIPE, env=environment)
    ending = threading.Event()
    _watch(process.pid, "torchrun", ending)
    ranks = join_ranks(parallel, 0, folder, cuda)
    others = [_watch(pid, f"rank {number}", ending) for number, pid in enumerate(ranks.pids(), 1)]
    try:
        yield ranks
    finally:
        ending.set()
        assert process.stdin is not None
        process.stdin.close()
        for other in others:
            other.join(_END_S)
        # torchrun would end slowly, and print a failure that is none.
        process.kill()
        process.wait()


def torchrun(parallel: Parallel, folder: Path, cuda: bool) -> list[str]:
    """Return the command that starts ranks 1 and up."""
    given = [str(folder), "cuda" if cuda else "cpu", msgspec.json.encode(parallel).decode()]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={parallel.world - 1}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/torchrun", "--rdzv-conf=store_type=file", "--rdzv-id=artd",
        "--local-addr=127.0.0.1", "--max-restarts=0", "--monitor-interval=0.2", "-m", PEER, *given,
    ]  # fmt: skip


def _watch(pid: int, what: str, ending: threading.Event) -> threading.Thread:
    """End this process when process `pid` ends, unless `ending` is set. This works whatever this process is waiting
    for.
    """
    handle = os.pidfd_open(pid)

    def wait() -> None:
        select.select([handle], [], [])
        if not ending.is_set():
            print(f"trainer worker: {what} (process {pid}) ended, and with it this one", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=wait, name=what, daemon=True)
    thread.start()
    return thread

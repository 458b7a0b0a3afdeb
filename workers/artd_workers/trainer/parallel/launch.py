"""How a trainer's process, rank 0, gets the others that train with it.

Purpose: `started` runs ranks 1 and up through torchrun and ends them with the block. Owner of: the torchrun process, and the folder
in which the ranks meet. Invariants: nothing listens beyond loopback (ranks and torchrun meet in files; gloo and NCCL are kept
on `lo`); when one rank dies all do: rank 0 waits for the end of each, and the others for that of their standard input, whose other
end it holds.
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

from artd_schema.spec import RunSpec
from artd_workers.trainer import placement

from .layout import Parallel
from .ranks import Ranks, join_ranks

PEER = "artd_workers.trainer.peer"
_END_S = 5.0


def layout(spec: RunSpec) -> Parallel:
    """A run's layout. Raises ValueError when it cannot be started here."""
    parallel = Parallel.of(spec)
    if placement.device_of(spec) == "cuda" and torch.cuda.device_count() < parallel.world:
        raise ValueError(
            f"the run takes {parallel.world} GPUs for its trainer, and torch sees {torch.cuda.device_count()}: start artd "
            "where there are as many, or a run with lower sizes trainer.*_parallel"
        )
    return parallel


@contextmanager
def start_ranks(parallel: Parallel, cuda: bool) -> Iterator[Ranks]:
    """The ranks of a layout, with this process as the first; the others end with the block."""
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
        # It would take its time, and print what it takes for a failure.
        process.kill()
        process.wait()


def torchrun(parallel: Parallel, folder: Path, cuda: bool) -> list[str]:
    """The command that starts ranks 1 and up."""
    given = [str(folder), "cuda" if cuda else "cpu", msgspec.json.encode(parallel).decode()]
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={parallel.world - 1}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint={folder}/torchrun", "--rdzv-conf=store_type=file", "--rdzv-id=artd",
        "--local-addr=127.0.0.1", "--max-restarts=0", "--monitor-interval=0.2", "-m", PEER, *given,
    ]  # fmt: skip


def _watch(pid: int, what: str, ending: threading.Event) -> threading.Thread:
    """End this process when another has ended, whatever it is waiting for, unless that was to be."""
    handle = os.pidfd_open(pid)

    def wait() -> None:
        select.select([handle], [], [])
        if not ending.is_set():
            print(f"trainer worker: {what} (process {pid}) ended, and with it this one", file=sys.stderr, flush=True)
            os._exit(1)

    thread = threading.Thread(target=wait, name=what, daemon=True)
    thread.start()
    return thread

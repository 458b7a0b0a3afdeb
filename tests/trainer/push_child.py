"""One rank of several that train a toy and push it, steered line by line.

Argument: JSON {rank, world, folder}. The ranks meet in `folder`. Every rank reads layouts ({do: layout, name, spec, fault} ...
{do: over}). Within a layout rank 0 reads jobs and pushes, and the others follow it. Rank 0 prints one JSON line for each
result.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from megatron.core import parallel_state

from artd_schema.run.spec import RunSpec
from artd_schema.wire import worker as w
from artd_workers.trainer import placement
from artd_workers.trainer.parallel import ranks
from artd_workers.trainer.parallel.channel import Channel
from artd_workers.trainer.parallel.layout import Parallel
from artd_workers.trainer.parallel.ranks import Ranks
from artd_workers.trainer.placement import Placement
from artd_workers.trainer.push import serving
from artd_workers.trainer.push.direct.weight_source import WeightSource
from artd_workers.trainer.push.pusher import Pusher
from artd_workers.trainer.trainer import Order
from tests.other_memory import OtherPort

from . import push_faults
from .test_memory import Desk

OVER = b"over"


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # Buffers that are filled many times in a push; a layer's experts are one parameter, as on a GPU.
    serving.WeightSource = partial(WeightSource, buffers=3, buffer_bytes=1 << 15)
    placement.of = lambda spec, layers: Placement(grouped=True)
    meeting = Path(given["folder"]) / "meeting"
    meeting.mkdir(exist_ok=True)
    ranks.meet(given["world"], given["rank"], meeting, cuda=False)
    lines = (json.loads(line) for line in sys.stdin)
    for line in lines:
        layout(Path(given["folder"]), given["rank"], line, lines)


def layout(folder: Path, rank: int, told: dict[str, Any], lines: Iterator[dict[str, Any]]) -> None:
    spec = msgspec.convert(told["spec"], RunSpec)
    together = ranks.make_groups(Parallel.of(spec), rank)
    channels: list[Channel] = []
    make = Ranks.channel
    Ranks.channel = lambda self, *rest: channels.append(make(self, *rest)) or channels[-1]
    out = folder / told["name"]
    out.mkdir(exist_ok=True)
    desk = Desk(out, spec, OtherPort(), together)
    with push_faults.of(told.get("fault"), rank):
        Lead(desk).follow(lines) if rank == 0 else follow(desk)
    for channel in channels:
        channel.close()
    Ranks.channel = make
    if rank == 0:
        say(over=told["name"])
    next(lines, None) if rank else None
    parallel_state.destroy_model_parallel()


def follow(desk: Desk) -> None:
    while (data := desk.trainer.ranks.receive_order()) != OVER:
        try:
            desk.trainer.follow(msgspec.msgpack.decode(data, type=Order))
        except Exception as error:
            print(f"rank {desk.trainer.ranks.rank}: {error!r}", file=sys.stderr)
            assert not desk.trainer.ranks.broken


class Lead:
    """Rank 0: what the daemon tells it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk
        self._pusher = Pusher(lambda refused: say(refused=msgspec.to_builtins(refused)))

    def follow(self, lines: Iterator[dict[str, Any]]) -> None:
        for line in lines:
            if line["do"] == "over":
                break
            getattr(self, line["do"])(**line["with"])
        self._desk.trainer.ranks.send_order(OVER)

    def commit(self, step: int, parent: dict[str, Any] | None) -> None:
        """In a thread of its own: pushes go on beside."""
        ref = msgspec.convert(parent, w.CheckpointRef) if parent else None

        def work() -> None:
            try:
                say(committed=msgspec.to_builtins(self._desk.commit(step, ref)))
            except Exception as error:
                say(failed=repr(error))

        threading.Thread(target=work, daemon=True).start()

    def push(self, message: dict[str, Any]) -> None:
        push = msgspec.convert(message, w.Push)
        self._pusher.push(push, self._desk.trainer.snapshot_of(push.checkpoint))

    def end(self, push: int) -> None:
        self._pusher.end(push, push)

    def idle(self) -> None:
        """Says so when no push runs."""
        for running in list(self._pusher._running.values()):
            running.over.wait(30)
        say(idle=not self._pusher._running)


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()

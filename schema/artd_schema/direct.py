"""The direct push on paper: what an engine's kernels read, what fills it, and what the trainer offers to be copied.

Three documents, none of which holds a weight: the engine's `EngineTable`, the `Plan` that each trainer process makes from it, and
the `Offer` of one (trainer spawn, engine spawn) pair. All offsets and counts are in elements unless they say bytes.
"""

from __future__ import annotations

from msgspec import Struct

TABLE, OFFER = "table", "offer"
"""Files, in MessagePack: the engine's table in the folder of its spawn, a trainer's offer in the folder `Push.rendezvous`."""


class EngineTensor(Struct, frozen=True, array_like=True):
    """One tensor that kernels read. dtype: torch's name; stride: in elements; layer: class of the module that holds it;
    segment: number of the storage that it lies in (two tensors of one storage share it); at: bytes from its begin. parts: the Hugging
    Face tensors that fill it, one behind the other; those with `{e}` once for each expert of its first dimension; none = the one of
    its name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layer: str
    segment: int
    at: int
    parts: tuple[str, ...] = ()


class Obstacle(Struct, frozen=True, array_like=True):
    """Why this engine cannot be pushed to directly. where: the layer, or the setting."""

    where: str
    why: str


class EngineTable(Struct, frozen=True, kw_only=True):
    """What one worker of an engine holds, in the model's order. moe_backend: "" for a dense model; obstacles: none = the
    direct path may be used."""

    engine: str
    version: str
    moe_backend: str
    tensors: tuple[EngineTensor, ...]
    obstacles: tuple[Obstacle, ...] = ()


class Piece(Struct, frozen=True, array_like=True):
    """`count` elements that lie together in one of a trainer process's tensors.

    tensor: index in `EngineTable.tensors`, at: offset there; part: index in `Plan.parts`, first: offset in the whole Hugging Face
    tensor; own: offset in what this process has of that tensor; source: index in `Plan.sources`, begin: offset there. width: in
    the engine's and the Hugging Face tensor they are rows of so many elements, each `pitch` behind the one before; 0 = they lie
    together there too.
    """

    tensor: int
    at: int
    part: int
    first: int
    own: int
    source: int
    begin: int
    count: int
    width: int = 0
    pitch: int = 0


class Plan(Struct, frozen=True, kw_only=True):
    """Which element of a trainer process's tensors fills which of the engine's. parts: Hugging Face names; sources: Megatron's.

    The pieces of all processes together hold every element of the engine's tensors and of the model's exactly once; those of one
    process hold every element of the sources that it gives exactly once.
    """

    parts: tuple[str, ...]
    sources: tuple[str, ...]
    pieces: tuple[Piece, ...]


class Segment(Struct, frozen=True, array_like=True):
    """Memory of a trainer process that the engine opens once, or over NCCL makes itself. handle: a raw CUDA IPC handle
    (64 bytes), empty over NCCL; size: bytes."""

    handle: bytes
    size: int


class Run(Struct, frozen=True, array_like=True):
    """`count` elements to copy that lie together in a segment, `byte` bytes behind its begin; the rest as in `Piece`, part: index
    in `Offer.parts`."""

    tensor: int
    at: int
    part: int
    first: int
    segment: int
    byte: int
    count: int
    width: int = 0
    pitch: int = 0


class Unit(Struct, frozen=True, array_like=True):
    """What is copied at once. slot: -1 = it lies ready at any time; else it is in a slot of the ring once `slot` + 1 slots
    were filled, and until the engine says that it has copied `slot` + 1."""

    slot: int
    runs: tuple[Run, ...]


class Feed(Struct, frozen=True, kw_only=True):
    """What one trainer process gives. page: path of its `ring.Page`, empty over NCCL; nccl: id of the communicator (128 bytes)
    over which each slot's buffer is sent into the engine's segment of that number modulo their count; empty where the engine
    opens the segments. pid, ticks: the process (start time in clock ticks): when it dies, the engine closes the segments by
    itself, because an open mapping pins the memory of a process that has died."""

    pid: int
    ticks: int
    segments: tuple[Segment, ...]
    units: tuple[Unit, ...]
    page: str = ""
    nccl: bytes = b""


class Offer(Struct, frozen=True, kw_only=True):
    """What a trainer spawn offers to an engine spawn, for all of its pushes. parts: Hugging Face names, which the runs' `part` and
    the weight table's checksums go by; itemsize: bytes of an element; feeds: one for each process that gives anything."""

    itemsize: int
    parts: tuple[str, ...]
    feeds: tuple[Feed, ...]

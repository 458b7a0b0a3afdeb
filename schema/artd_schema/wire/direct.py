"""The documents of a direct push: what an engine's kernels read, what fills it, and what the trainer offers to be copied.

None of them holds a weight: the engine's `EngineTable`, the `Plan` that each trainer process makes from it, and the `Offer` of
one (trainer spawn, engine spawn) pair. All offsets and counts are in elements unless they say bytes.
"""

from __future__ import annotations

from msgspec import Struct

TABLE, OFFER = "table", "offer"
"""Names of files in MessagePack: the engine's table in the folder of its spawn, a trainer's offer in the folder `Push.rendezvous`."""


class EngineTensor(Struct, frozen=True, array_like=True):
    """One tensor that kernels read.

    `dtype`: torch's name. `stride`: in elements. `layer`: class of the module that holds it. `segment`: number of its storage,
    which several tensors may share. `at`: bytes from the storage's beginning. `parts`: the Hugging Face tensors that fill it,
    one after the other; those with `{e}` once for each expert of its first dimension; none = the tensor of the same name.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    layer: str
    segment: int
    at: int
    parts: tuple[str, ...] = ()


class Obstacle(Struct, frozen=True, array_like=True):
    """A reason why this engine cannot receive a direct push. `where`: the layer, or the setting."""

    where: str
    why: str


class EngineTable(Struct, frozen=True, kw_only=True):
    """The tensors of one worker of an engine, in the model's order. `moe_backend`: "" for a dense model; `obstacles`: none = a
    direct push is possible."""

    engine: str
    version: str
    moe_backend: str
    tensors: tuple[EngineTensor, ...]
    obstacles: tuple[Obstacle, ...] = ()


class Piece(Struct, frozen=True, array_like=True):
    """`count` adjacent elements of one of a trainer process's tensors, and where they go.

    `tensor`: index in `EngineTable.tensors`; `at`: offset there. `part`: index in `Plan.parts`; `first`: offset in the whole
    Hugging Face tensor. `own`: offset in what this process holds of that tensor. `source`: index in `Plan.sources`; `begin`:
    offset there. `width`: in the engine's and the Hugging Face tensor the elements are rows of this width, each `pitch`
    elements after the row before; 0 = they are adjacent there too.
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
    """Which element of a trainer process's tensors fills which element of the engine's. `parts`: Hugging Face names; `sources`:
    Megatron's.

    The pieces of all processes together hold every element of the engine's tensors and of the model's exactly once. Those of
    one process hold every element of its sources exactly once.
    """

    parts: tuple[str, ...]
    sources: tuple[str, ...]
    pieces: tuple[Piece, ...]


class Segment(Struct, frozen=True, array_like=True):
    """Memory of a trainer process that the engine opens once; over NCCL the engine's own. `handle`: raw CUDA IPC handle (64
    bytes), empty over NCCL; `size`: bytes."""

    handle: bytes
    size: int


class Run(Struct, frozen=True, array_like=True):
    """`count` elements to copy that are adjacent in a segment, from `byte` bytes after its beginning.

    `part`: index in `Offer.parts`; the other fields are those of `Piece`.
    """

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
    """Elements that are copied together.

    `slot`: -1 = they are ready at any time. Otherwise they are in a slot of the ring, from when `slot` + 1 slots were filled
    until the engine reports that it has copied `slot` + 1.
    """

    slot: int
    runs: tuple[Run, ...]


class Feed(Struct, frozen=True, kw_only=True):
    """What one trainer process gives.

    `page`: path of its `ring.Page`, empty over NCCL. `nccl`: id of the communicator (128 bytes) that carries each slot's buffer
    into the engine's segment of that number modulo their count; empty where the engine opens the segments. `pid`, `ticks`: the
    process and its start time in clock ticks. When it dies, the engine closes the segments by itself, because an open mapping
    pins the memory of a dead process.
    """

    pid: int
    ticks: int
    segments: tuple[Segment, ...]
    units: tuple[Unit, ...]
    page: str = ""
    nccl: bytes = b""


class Offer(Struct, frozen=True, kw_only=True):
    """What a trainer spawn offers to an engine spawn, for all of its pushes.

    `parts`: Hugging Face names, to which `Run.part` and the weight table's checksums refer. `itemsize`: bytes of an element.
    `feeds`: one for each process that gives a part.
    """

    itemsize: int
    parts: tuple[str, ...]
    feeds: tuple[Feed, ...]

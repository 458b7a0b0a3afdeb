"""Writes and reads a safetensors file in chunks: writing never copies all of it, and reading fills the memory in which it
stays.

A checkpoint has tens of GB in a hundred thousand tensors. They are gathered on their own device, a GPU too, and reach the host
in few large copies. The bytes are those of `safetensors.torch.save(tensors, {"format": "pt"})` (format:
huggingface/safetensors, README, "Format"). A file that is read is hashed, and the hashed bytes themselves are used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import cycle, groupby
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import writer

TYPES = {"I64": torch.int64, "F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The format's name of each dtype, in the order in which a file stores them."""
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_ORDER = {dtype: number for number, dtype in enumerate(TYPES.values())}
_WORD = 8
_MAKING = Lock()
"""Held while a chunk is made. That runs Python code for each tensor, and several such threads would take the interpreter from each other and from the
threads that hash and write, 5 ms at a time. On an H200 eight threads made 10 GB of chunks in 5.1 s, one in 1.6 s."""
Bytes = NDArray[np.uint8]


def chunks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    """Yield the file's bytes; see `Files.stream`. Raises ValueError for a dtype that no checkpoint has.

    The tensors are on one device, with any strides, and must not change meanwhile.
    """
    if odd := [name for name, tensor in tensors.items() if tensor.dtype not in _ORDER]:
        raise ValueError(f"{odd[0]} is {tensors[odd[0]].dtype}, which no checkpoint holds")
    for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
        torch.cuda.synchronize(device)  # another thread gathers the chunks, on a stream of its own
    return _one_at_a_time(_chunks(sorted(tensors.items(), key=lambda item: (_ORDER[item[1].dtype], item[0]))))


def _one_at_a_time(chunks: Iterator[memoryview]) -> Iterator[memoryview]:
    while True:
        with _MAKING:
            chunk = next(chunks, None)
        if chunk is None:
            return
        yield chunk


def _chunks(ordered: list[tuple[str, Tensor]]) -> Iterator[memoryview]:
    yield memoryview(_header(ordered))
    size = min(writer.CHUNK, sum(_bytes(tensor) for _, tensor in ordered))
    gpu = next((tensor.device for _, tensor in ordered if tensor.is_cuda), None)
    buffers = cycle([_OnHost(size) if gpu is None else _OnGpu(size, gpu) for _ in range(writer.BUFFERS)])
    for _, same in groupby((tensor for _, tensor in ordered), lambda tensor: (tensor.dtype, tensor.device)):
        for pieces in _cut(same, size):
            yield next(buffers).take(pieces)


def _header(ordered: list[tuple[str, Tensor]]) -> bytes:
    fields: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in ordered:
        end = at + _bytes(tensor)
        fields[name] = {"dtype": _NAMES[tensor.dtype], "shape": tuple(tensor.shape), "data_offsets": (at, end)}
        at = end
    text = msgspec.json.encode(fields)
    text += b" " * (-len(text) % _WORD)
    return len(text).to_bytes(_WORD, "little") + text


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _cut(tensors: Iterator[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Yield lists of flat pieces of tensors of one dtype; each list fills at most `size` bytes."""
    pieces: list[Tensor] = []
    room = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        whole = size // tensor.element_size()
        while len(flat):
            if not pieces:
                room = whole
            taken = min(room, len(flat))
            pieces.append(flat[:taken] if taken < len(flat) else flat)
            flat, room = flat[taken:], room - taken
            if not room:
                yield pieces
                pieces = []
    if pieces:
        yield pieces


class _OnHost:
    """A host buffer that holds one chunk after the other."""

    def __init__(self, size: int) -> None:
        self._host = torch.empty(size, dtype=torch.uint8)

    def take(self, pieces: list[Tensor]) -> memoryview:
        return _gather(pieces, self._host).numpy().data


class _OnGpu(_OnHost):
    """A buffer for tensors of a GPU: pieces are gathered there, and copied at once into pinned memory."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        self._stream = _stream(device)

    def take(self, pieces: list[Tensor]) -> memoryview:
        if not pieces[0].is_cuda:  # the optimizer's step count is on the CPU
            return super().take(pieces)
        # `reshape` may have copied a tensor that is not contiguous; wait until that copy is done.
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            found = _gather(pieces, torch.empty(len(self._host), dtype=torch.uint8, device=pieces[0].device))
            host = self._host[: len(found)].copy_(found, non_blocking=True)
            self._stream.synchronize()
        return host.numpy().data


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all files, so that the memory which torch keeps for it serves the next file too."""
    return torch.cuda.Stream(device)


def _gather(pieces: list[Tensor], into: Tensor) -> Tensor:
    """Copy flat pieces of one dtype one after the other into a buffer of bytes. Returns the part that they fill."""
    into = into[: sum(map(_bytes, pieces))]
    torch.cat(pieces, out=into.view(pieces[0].dtype))
    return into


# ---- reading ----------------------------------------------------------------------------------------------------------


def read(path: Path) -> tuple[Bytes, str]:
    """Read a whole file. Returns its bytes, uint8, and its sha256, which another thread computes meanwhile. Raises OSError."""
    sha, at = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(1, thread_name_prefix="artd-read") as hashing:
        data = np.empty(path.stat().st_size, dtype=np.uint8)
        while count := file.readinto(data[at : at + writer.CHUNK].data):
            hashing.submit(sha.update, data[at : at + count].data)
            at += count
    return data[:at], sha.hexdigest()


def parse(data: Bytes) -> dict[str, Tensor]:
    """Return the tensors of a file, in its order, as views of `data`. Raises ValueError for bytes that are not such a file."""
    try:
        start = _WORD + int.from_bytes(data[:_WORD].tobytes(), "little")
        fields = msgspec.json.decode(data[_WORD:start].tobytes(), type=dict[str, Any])
        fields.pop("__metadata__", None)
        body = torch.from_numpy(data[start:])
        return {name: _tensor(body, **field) for name, field in fields.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, OverflowError, RuntimeError, TypeError, KeyError) as error:
        raise ValueError(f"not a safetensors file: {error!r}") from None


def _tensor(body: Tensor, dtype: str, shape: list[int], data_offsets: tuple[int, int]) -> Tensor:
    begin, end = data_offsets
    return body[begin:end].view(TYPES[dtype]).view(shape)

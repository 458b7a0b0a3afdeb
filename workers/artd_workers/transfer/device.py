"""The GPU as a pull uses it: another process's memory by handle, queues of copies and sums, and marks in them.

`Cuda` is the `contracts.Port` of a GPU. It calls the CUDA runtime that torch has loaded through ctypes, so that a
handle is opened once and never pickled. It owns the mappings that it has opened. A queue works in order. Only
`Mark.done` and `Queue.settle` wait for the device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .checksum import Blocks, Span
from .contracts import DeviceError, Wire

HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_DEFAULT_KIND = 4


class _Handle(ctypes.Structure):
    _fields_ = [("raw", ctypes.c_char * HANDLE_BYTES)]


class Cuda:
    """The GPU `index`. This process must use a torch with CUDA."""

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)
        torch.cuda.init()
        self._runtime = ctypes.CDLL(_loaded_path("libcudart.so"))
        self._driver = ctypes.CDLL("libcuda.so.1")
        with torch.cuda.device(self.device):
            self._check(self._runtime.cudaFree(None), "cudaFree(0)")

    def share(self, tensor: Tensor) -> tuple[bytes, int, int]:
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
        code = self._driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(tensor.data_ptr())
        )
        self._check(code, "cuMemGetAddressRange")
        code = self._runtime.cudaIpcGetMemHandle(ctypes.byref(handle), ctypes.c_void_p(base.value))
        self._check(
            code, "cudaIpcGetMemHandle: memory of expandable segments cannot be shared, unset expandable_segments"
        )
        return bytes(handle), base.value, size.value

    def open(self, handle: bytes) -> int:
        address = ctypes.c_void_p()
        with torch.cuda.device(self.device):
            code = self._runtime.cudaIpcOpenMemHandle(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
        self._check(code, "cudaIpcOpenMemHandle")
        return address.value or 0

    def close(self, address: int) -> None:
        with torch.cuda.device(self.device):  # any thread may close: the one that sees the trainer die does
            self._check(self._runtime.cudaIpcCloseMemHandle(ctypes.c_void_p(address)), "cudaIpcCloseMemHandle")

    def free(self) -> int:
        return torch.cuda.mem_get_info(self.device)[0]

    def queue(self) -> CudaQueue:
        return CudaQueue(self)

    def sums(self, spans: Sequence[Span]) -> Any:
        from .checksum_kernels import Table  # Triton is installed only with GPUs

        with torch.cuda.device(self.device):  # a new thread starts on GPU 0, and the kernels are compiled here
            return Table(Blocks.cut(spans, self.device))

    def wire(self) -> Wire:
        from artd_workers.transfer.nccl.connection import Nccl

        return Nccl(self.device)

    def memcpy(self, to: int, source: int, size: int, stream: int) -> None:
        code = self._runtime.cudaMemcpyAsync(
            ctypes.c_void_p(to), ctypes.c_void_p(source), ctypes.c_size_t(size), _DEFAULT_KIND, ctypes.c_void_p(stream)
        )
        if code:
            self._check(code, f"cudaMemcpyAsync of {size} bytes")

    def memcpy2d(self, to: int, pitch: int, source: int, width: int, rows: int, stream: int) -> None:
        code = self._runtime.cudaMemcpy2DAsync(
            ctypes.c_void_p(to), ctypes.c_size_t(pitch), ctypes.c_void_p(source), ctypes.c_size_t(width),
            ctypes.c_size_t(width), ctypes.c_size_t(rows), _DEFAULT_KIND, ctypes.c_void_p(stream),
        )  # fmt: skip
        if code:
            self._check(code, f"cudaMemcpy2DAsync of {rows} rows of {width} bytes, {pitch} apart")

    def _check(self, code: int, what: str) -> None:
        if code:
            self._runtime.cudaGetLastError()  # clear the error, which torch would report again
            self._runtime.cudaGetErrorString.restype = ctypes.c_char_p
            raise DeviceError(f"{what}: {self._runtime.cudaGetErrorString(code).decode()} ({code})")


class CudaMark:
    """A place in a `CudaQueue`."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()
        self.event.record(stream)

    def done(self) -> bool:
        return self.event.query()


class CudaQueue:
    """A queue with a CUDA stream of its own."""

    def __init__(self, port: Cuda) -> None:
        self._port = port
        self._stream = torch.cuda.Stream(port.device)

    @property
    def stream(self) -> torch.cuda.Stream:
        return self._stream

    def copy(self, to: int, source: int, size: int) -> None:
        self._port.memcpy(to, source, size, self._stream.cuda_stream)

    def copy2d(self, to: int, pitch: int, source: int, width: int, rows: int) -> None:
        self._port.memcpy2d(to, pitch, source, width, rows, self._stream.cuda_stream)

    def sum(self, table: Any, sums: Tensor, spans: tuple[int, int], copy: bool = False) -> None:
        with torch.cuda.stream(self._stream):
            table.sum(sums, spans, copy)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream)

    def after(self, mark: CudaMark) -> None:
        self._stream.wait_event(mark.event)

    def settle(self) -> None:
        self._stream.synchronize()


def _loaded_path(name: str) -> str:
    """Return the path of a library that this process has loaded. Raises DeviceError."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            path = line.rpartition(" ")[2].strip()
            if path.rpartition("/")[2].startswith(name):
                return path
    raise DeviceError(f"torch has not loaded {name}: the direct push needs a torch that is built for CUDA")

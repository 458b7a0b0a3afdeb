"""The copies of a pull as `device.Cuda` asks the CUDA runtime for them: a library with the runtime's signatures does them."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

import pytest
import torch

from artd_workers.transfer.contracts import DeviceError
from artd_workers.transfer.device import Cuda
from tests.compiled import library

pytestmark = pytest.mark.torch
FAKE = Path(__file__).parents[1] / "fakes" / "cudart.c"


@pytest.fixture
def cuda() -> Any:
    """A port that no GPU is looked for by, and a stream as wide as a pointer."""
    port: Any = object.__new__(Cuda)
    port._runtime = ctypes.CDLL(str(library(FAKE)))
    port._runtime.fake_stream.restype = ctypes.c_void_p
    return port


def test_rows_get_their_pitch(cuda):
    rows, width, pitch = 5, 3, 7
    source = torch.arange(rows * width, dtype=torch.uint8) + 1
    to = torch.zeros(rows, pitch, dtype=torch.uint8)
    cuda.memcpy2d(to.data_ptr() + 2, pitch, source.data_ptr(), width, rows, cuda._runtime.fake_stream())
    assert torch.equal(to[:, 2:5], source.view(rows, width)) and int(to.count_nonzero()) == rows * width


def test_a_copy_as_long_as_it_is(cuda):
    source, to = torch.arange(20, dtype=torch.uint8), torch.full((20,), 9, dtype=torch.uint8)
    cuda.memcpy(to.data_ptr() + 1, source.data_ptr() + 5, 4, cuda._runtime.fake_stream())
    assert to[:7].tolist() == [9, 5, 6, 7, 8, 9, 9]


def test_a_pitch_beyond_32_bits(cuda, tmp_path):
    pitch = (1 << 32) + 5
    with (tmp_path / "holes").open("w+b") as file:
        file.truncate(pitch + 2)
        memory = mmap.mmap(file.fileno(), pitch + 2)
        begin, source = ctypes.c_char.from_buffer(memory), torch.tensor([1, 2, 3, 4], dtype=torch.uint8)
        cuda.memcpy2d(ctypes.addressof(begin), pitch, source.data_ptr(), 2, 2, cuda._runtime.fake_stream())
        assert (memory[:3], memory[pitch - 1 :]) == (b"\1\2\0", b"\0\3\4")
        del begin


def test_what_the_runtime_refuses_is_told(cuda):
    source = torch.zeros(8, dtype=torch.uint8)
    with pytest.raises(DeviceError, match=r"2 rows of 4 bytes, 3 apart: invalid pitch argument \(12\)"):
        cuda.memcpy2d(source.data_ptr(), 3, source.data_ptr(), 4, 2, cuda._runtime.fake_stream())
    with pytest.raises(DeviceError, match=r"cudaMemcpyAsync of 4 bytes: invalid argument"):
        cuda.memcpy(source.data_ptr(), source.data_ptr() + 4, 4, 0)

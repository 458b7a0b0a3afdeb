"""A checkpoint's files: their bytes, the order in which they become durable, and a disk that fails at any call."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from itertools import chain, count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from artd_schema.data.manifest import ADAPTER_CONFIG_FILE, ADAPTER_FILE, MANIFEST_FILE, OPTIMIZER_FILE, Canary
from artd_schema.wire.worker import CheckpointRef
from artd_workers.trainer.checkpoint import folder as checkpoint
from artd_workers.trainer.checkpoint import tensor_file, writer
from artd_workers.trainer.checkpoint.folder import STATE, CheckpointError, Staging, State

pytestmark = pytest.mark.torch
FIELDS: dict[str, Any] = {
    "run": "r", "step": 1, "epoch": 1, "lineage": 0, "parent": "", "batch": "", "base_digest": "", "spec_digest": "",
    "instance": "i", "job": 1, "fence": 1, "canary": Canary(prompts=(), logprobs=(), max_abs=1.0, mean_abs=1.0),
}  # fmt: skip


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many chunks of few numbers."""
    monkeypatch.setattr(writer, "CHUNK", 64)
    monkeypatch.setattr(writer, "SYNC_EVERY", 128)


def drawn(seed: int = 0) -> dict[str, Tensor]:
    """One of each kind: scalars, nothing, parts of another, strides, larger than a chunk."""
    torch.manual_seed(seed)
    whole = torch.randn(4, 6, 5)
    return {
        "b.10": whole[1], "b.2": whole[2].t(), "b.1": whole[:, 1], "step": torch.tensor(seed), "z": torch.randn(300),
        "ä \"quoted\" \\ \n": torch.randn(3), "empty": torch.empty(0, 4), "bf": torch.randn(7).bfloat16(),
        "half": torch.randn(5).half(), "double": torch.randn(3).double(), "one": torch.randn(1, 1),
        "trained": torch.nn.Parameter(torch.randn(2, 2)), "same": torch.zeros(1).expand(3, 4),
    }  # fmt: skip


def contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def staged(folder: Path, tensors: dict[str, Tensor] | None = None) -> CheckpointRef:
    found = drawn() if tensors is None else tensors
    with Staging(folder) as files:
        files.tensors(ADAPTER_FILE, found)
        files.tensors(OPTIMIZER_FILE, {f"{name}.exp_avg": tensor for name, tensor in found.items()})
        files.json(STATE, State(step=1))
        files.json(ADAPTER_CONFIG_FILE, {"r": 2})
        files.weights("merged", ())
        sha = files.finish(**FIELDS)
    return CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=sha, dir=str(folder))


def writers() -> list[str]:
    return [one.name for one in threading.enumerate() if one.name.startswith(("artd-stage", "ThreadPool"))]


# ---- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [8, 64, 1000, 1 << 20])
def test_a_file_is_what_the_library_would_write(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(writer, "CHUNK", chunk)
    found = b"".join(bytes(one) for one in tensor_file.chunks(drawn()))
    assert found == save(contiguous(drawn()), {"format": "pt"})
    assert b"".join(bytes(one) for one in tensor_file.chunks({})) == save({}, {"format": "pt"})


@pytest.mark.usefixtures("small")
def test_written_hashed_and_read_back(tmp_path: Path) -> None:
    ref = staged(tmp_path / "one")
    read = checkpoint.read(ref, ADAPTER_FILE)
    wanted = load((tmp_path / "one" / ADAPTER_FILE).read_bytes())
    assert read.weights.keys() == wanted.keys() and read.state == State(step=1)
    for name, tensor in wanted.items():
        assert read.weights[name].dtype == tensor.dtype and torch.equal(read.weights[name], tensor), name
    for entry in read.manifest.files:
        raw = (tmp_path / "one" / entry.name).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry.bytes, entry.sha256), entry.name
    assert {entry.name for entry in read.manifest.files} == {*os.listdir(tmp_path / "one")} - {MANIFEST_FILE}
    assert staged(tmp_path / "two").sha == ref.sha
    assert not writers()


def test_no_chunk_is_made_anew_before_it_was_hashed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still at the second chunk: no more are made than there are buffers for."""
    made: list[int] = []
    goes_on, stuck, real = threading.Event(), threading.Event(), os.write

    def held(handle: int, data: memoryview) -> int:
        if bytes(data) == b"1":
            stuck.set()
            assert goes_on.wait(20)
        return real(handle, data)

    def chunks() -> Iterator[memoryview]:
        for number in range(9):
            made.append(number)
            if number == 1 + writer.BUFFERS - 1:
                threading.Timer(0.2, goes_on.set).start()
            assert number <= writer.BUFFERS or goes_on.is_set(), (
                "chunk 1 is not written yet, and its memory is used again"
            )
            yield memoryview(str(number).encode())

    monkeypatch.setattr(os, "write", held)
    with writer.Files(tmp_path / "one") as files:
        files.stream("file", chunks())
        files.finish(**FIELDS)
    assert stuck.is_set() and (tmp_path / "one" / "file").read_bytes() == b"012345678"


def test_what_no_checkpoint_holds_is_refused(tmp_path: Path) -> None:
    with Staging(tmp_path / "one") as files, pytest.raises(ValueError, match="odd is torch.complex64"):
        files.tensors(ADAPTER_FILE, {"odd": torch.zeros(1, dtype=torch.complex64)})


@pytest.mark.parametrize("name", [ADAPTER_FILE, ADAPTER_CONFIG_FILE, OPTIMIZER_FILE, STATE])
def test_a_changed_or_missing_file_is_not_used(tmp_path: Path, name: str) -> None:
    ref, path = staged(tmp_path / "one"), tmp_path / "one" / name
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"{name} has sha256 .* committed was"):
        checkpoint.read(ref, ADAPTER_FILE)
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing"):
        checkpoint.read(ref, ADAPTER_FILE)


@pytest.mark.parametrize("raw", [b"", b"\xff" * 40, b"\x02" + bytes(7) + b"[]", save({"a": torch.ones(9)})[:-4]])
def test_what_is_no_safetensors_file_is_told(tmp_path: Path, raw: bytes) -> None:
    with Staging(tmp_path / "one") as files:
        files.add(ADAPTER_FILE, raw)
        files.tensors(OPTIMIZER_FILE, drawn())
        files.json(STATE, State(step=1))
        files.json(ADAPTER_CONFIG_FILE, {"r": 2})
        sha = files.finish(**FIELDS)
    ref = CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=sha, dir=str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match="not a trainer's checkpoint"):
        checkpoint.read(ref, ADAPTER_FILE)


# ---- moments in several files -----------------------------------------------------------------------------------------


def spread(folder: Path, tensors: dict[str, Tensor]) -> CheckpointRef:
    with Staging(folder) as files:
        files.tensors(ADAPTER_FILE, {"a": torch.ones(2)})
        files.add_shards(OPTIMIZER_FILE, tensors)
        files.json(STATE, State(step=1))
        files.json(ADAPTER_CONFIG_FILE, {"r": 2})
        sha = files.finish(**FIELDS)
    return CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=sha, dir=str(folder))


def test_moments_that_fit_one_file_are_one(tmp_path: Path) -> None:
    spread(tmp_path / "one", drawn())
    assert (tmp_path / "one" / OPTIMIZER_FILE).read_bytes() == save(contiguous(drawn()), {"format": "pt"})


@pytest.mark.parametrize("streams", [1, 8])
def test_large_moments_are_files_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    monkeypatch.setattr(checkpoint, "SHARD", 4000)
    monkeypatch.setattr(writer, "STREAMS", streams)
    tensors = {f"{number:02}": torch.randn(400 + number) for number in reversed(range(20))} | {"07x": torch.randn(3000)}
    refs = [
        spread(tmp_path / name, dict(given)) for name, given in (("one", tensors), ("two", sorted(tensors.items())))
    ]
    assert refs[0].sha == refs[1].sha, "whatever the order in which they were given"
    files = checkpoint.shards_of(OPTIMIZER_FILE, os.listdir(tmp_path / "one"))
    assert files == [f"optimizer-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    held = [sorted(load(path.read_bytes())) for path in (tmp_path / "one" / file for file in files)]
    assert list(chain(*held)) == sorted(tensors) and ["07x"] in held
    assert all(sum(tensors[name].nbytes for name in names) <= 4000 for names in held if names != ["07x"])
    found = checkpoint.read(refs[0], ADAPTER_FILE).optimizer
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)
    (tmp_path / "one" / files[3]).unlink()
    with pytest.raises(CheckpointError, match=f"{files[3]} is missing"):
        checkpoint.read(refs[0], ADAPTER_FILE)


def test_a_checkpoint_without_moments_is_told(tmp_path: Path) -> None:
    with Staging(tmp_path / "one") as files:
        files.tensors(ADAPTER_FILE, drawn())
        files.tensors("optimizer-old.safetensors", drawn())
        files.json(STATE, State(step=1))
        files.json(ADAPTER_CONFIG_FILE, {"r": 2})
        sha = files.finish(**FIELDS)
    ref = CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=sha, dir=str(tmp_path / "one"))
    with pytest.raises(CheckpointError, match=OPTIMIZER_FILE):
        checkpoint.read(ref, ADAPTER_FILE)


# ---- the disk ---------------------------------------------------------------------------------------------------------


class Disk:
    """Tells of every call, and lets one fail. fails: number of the call that does, 0 = none."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails: int = 0, error: int = errno.EIO) -> None:
        self.calls: list[tuple[str, str]] = []
        self._fails, self._error, self._lock = fails, error, threading.Lock()
        for name in ("write", "fsync", "fdatasync"):
            monkeypatch.setattr(os, name, self._told(name, getattr(os, name)))

    def _told(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(handle: int, *more: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{handle}")
            with self._lock:
                number = len(self.calls) + 1
                self.calls.append((what, path.rpartition("/")[2]))
            if number == self._fails:
                raise OSError(self._error, os.strerror(self._error), path)
            if what == "write" and len(more[0]) > 40:  # a disk may take less than it is given
                return real(handle, more[0][:40])
            return real(handle, *more)

        return call


@pytest.mark.usefixtures("small")
def test_every_file_is_durable_before_the_manifest_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    ref = staged(tmp_path / "one")
    begun = disk.calls.index(("write", MANIFEST_FILE))
    for name in os.listdir(tmp_path / "one"):
        wrote = [number for number, call in enumerate(disk.calls) if call == ("write", name)]
        synced = [number for number, call in enumerate(disk.calls) if call == ("fsync", name)]
        assert wrote and synced == [max(synced)] and max(wrote) < synced[0], name
        assert name == MANIFEST_FILE or synced[0] < begun, name
    folder = [number for number, call in enumerate(disk.calls) if call == ("fsync", "one")]
    files = [
        number
        for number, (what, name) in enumerate(disk.calls)
        if what == "fsync" and name not in ("one", tmp_path.name)
    ]
    assert len(folder) == 2 and files[-2] < folder[0] < begun < files[-1] < folder[1], "names too"
    assert ("fdatasync", OPTIMIZER_FILE) in disk.calls, "the disk begins before the end"
    assert checkpoint.read(ref, ADAPTER_FILE).weights.keys() == drawn().keys()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_call_leaves_no_manifest_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    tensors = {"a": torch.arange(60.0), "b": torch.arange(9.0)}
    failed = 0
    for number in count(1):
        with monkeypatch.context() as patch:
            disk = Disk(patch, number, error)
            try:
                staged(tmp_path / "one", tensors)
            except OSError as raised:
                assert raised.errno == error
            else:
                break
        failed += 1
        what, name = disk.calls[number - 1]
        after = disk.calls[number:]
        if name in (MANIFEST_FILE, tmp_path.name) or disk.calls.count(("fsync", "one")) == 2:
            continue  # the manifest was begun, and the daemon is told that the job has failed
        assert not (tmp_path / "one" / MANIFEST_FILE).exists(), (what, name)
        assert ("write", MANIFEST_FILE) not in after
        assert not writers(), "threads that write on"
    assert failed > 25 and number > len(disk.calls)


def test_one_chunk_is_made_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that make them side by side take the interpreter from each other: that is three times as slow."""
    made, making, gathered = [0], threading.Lock(), tensor_file._gather

    def alone(pieces: list[Tensor], into: Tensor) -> Tensor:
        assert making.acquire(blocking=False), "two at once"
        threading.Event().wait(0.02)
        made[0] += 1
        making.release()
        return gathered(pieces, into)

    monkeypatch.setattr(tensor_file, "_gather", alone)
    with Staging(tmp_path / "one") as files:
        for name in ("a", "b", "c"):
            files.tensors(name, {"x": torch.ones(8)})
        files.finish(**FIELDS)
    assert made == [3]


@pytest.mark.parametrize("first", [True, False])
def test_a_file_that_fails_ends_the_others(tmp_path: Path, first: bool) -> None:
    asked: list[int] = []

    def endless() -> Iterator[memoryview]:
        for number in count():
            asked.append(number)
            yield memoryview(b"more")

    def broken() -> Iterator[memoryview]:
        yield memoryview(b"some")
        raise RuntimeError("CUDA error")

    with writer.Files(tmp_path / "one") as files:
        for name in ("broken", "endless") if first else ("endless", "broken"):
            files.stream(name, broken() if name == "broken" else endless())
        with pytest.raises(RuntimeError, match="CUDA error"):
            files.finish(**FIELDS)
    with pytest.raises(KeyError), writer.Files(tmp_path / "two") as files:
        files.stream("endless", endless())
        raise KeyError  # something else of the job
    at = len(asked)
    assert not writers() and len(asked) == at and not (tmp_path / "one" / MANIFEST_FILE).exists()

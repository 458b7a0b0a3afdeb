"""The replay bundle as it is read: right ones give the routes of each row, and every wrong one is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from artd_schema.data.manifest import ReplayManifest
from artd_schema.data.trajectory import RouteShape
from artd_workers.trainer.batch.rows import BatchError, read_batch

from . import rig, routes_rig
from .rig import Piece
from .routes_rig import Columns

pytestmark = pytest.mark.torch
SHAPE = RouteShape(layers=2, topk=2, experts=8)
SIZE = 32
_G = torch.Generator().manual_seed(3)


def ids(n: int) -> Tensor:
    return torch.randint(3, 1024, (n,), generator=_G)


# Row 0: a prompt of 8 with two answers (8-13, 14-20) and a sequence of its own (21-27); row 1: one sequence (0-9).
ROWS = [
    rig.row_columns(
        [
            Piece(ids(8)),
            Piece(ids(6), parent=0, trained_from=1),
            Piece(ids(7), parent=0, trained_from=1),
            Piece(ids(7), trained_from=3),
        ],
        SIZE,
    ),
    rig.row_columns([Piece(ids(10), trained_from=4)], SIZE),
]
COLUMNS = {name: torch.stack([row[name] for row in ROWS]) for name in ROWS[0]}
COLUMNS["trajectory_index"][1][:10] = 3
TRAJECTORIES = 4
LASTS = [(0, 13), (0, 20), (0, 27), (1, 9)]


def write(folder: Path, change: Callable[[Columns], None] = lambda bundle: None, **kwargs) -> routes_rig.Written:
    return routes_rig.write(folder, COLUMNS, TRAJECTORIES, kwargs.pop("shape", SHAPE), change=change, **kwargs)


@pytest.mark.parametrize("experts", [8, 300], ids=["u8", "u16"])
def test_each_row_gets_its_routes_without_padding(tmp_path: Path, experts: int) -> None:
    shape = RouteShape(layers=3, topk=2, experts=experts)
    batch = write(tmp_path, shape=shape).read(shape)
    wanted = routes_rig.bundle_columns(COLUMNS, shape)["routes"].long()
    assert [tuple(row.routes.shape) for row in batch.rows] == [(3, 28, 2), (3, 10, 2)]
    for index, row in enumerate(batch.rows):
        assert torch.equal(row.routes.long(), wanted[:, index, : len(row.tokens)])
    if experts > 256:
        assert max(int(row.routes.max()) for row in batch.rows) > 255
    assert batch.coverage == 34 / 38


def test_a_last_token_may_be_covered_too(tmp_path: Path) -> None:
    def cover(bundle: Columns) -> None:
        for row, at in LASTS:
            bundle["covered"][row, at] = 1
            bundle["routes"][:, row, at] = torch.tensor([5, 3])

    batch = write(tmp_path, cover).read(SHAPE)
    assert batch.coverage == 1.0 and batch.rows[0].routes[0, 13].tolist() == [5, 3]


def test_lasts_of_the_rig_are_the_ends_of_leaves() -> None:
    assert routes_rig.lasts(COLUMNS).nonzero().tolist() == [list(at) for at in LASTS]


def uncover(row: int, at: int) -> Callable[[Columns], None]:
    def change(bundle: Columns) -> None:
        bundle["covered"][row, at] = 0
        bundle["routes"][:, row, at] = torch.tensor([0, 1])

    return change


def put(row: int, at: int, layer: int, wrong: list[int]) -> Callable[[Columns], None]:
    def change(bundle: Columns) -> None:
        bundle["routes"][layer, row, at] = torch.tensor(wrong)

    return change


def cover_padding(bundle: Columns) -> None:
    bundle["covered"][1, 10] = 1


def zeros(bundle: Columns) -> None:
    bundle["routes"][:] = 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (uncover(0, 7), r"row 0: position 7 \(token 7 of a prefix that trajectories share\) has no routes"),
        (uncover(0, 12), r"row 0: position 12 \(token 12 of trajectory 1\) has no routes"),
        (uncover(0, 14), r"row 0: position 14 \(token 8 of trajectory 2\) has no routes"),
        (uncover(1, 0), r"row 1: position 0 \(token 0 of trajectory 4\) has no routes"),
        (
            put(0, 22, 1, [8, 0]),
            r"row 0: position 22 \(token 1 of trajectory 3\): MoE layer 1: expert id 8, but there are 8",
        ),
        (put(0, 30, 0, [0, 9]), r"row 0: position 30 \(padding\): MoE layer 0: expert id 9, but there are 8"),
        (
            put(1, 4, 0, [6, 6]),
            r"row 1: position 4 \(token 4 of trajectory 4\): MoE layer 0: expert ids \[6, 6\] are not distinct",
        ),
        (put(0, 13, 0, [2, 1]), r"row 0: position 13 .* marked as not covered"),
        (cover_padding, r"row 1: position 10 is padding and has routes"),
        (zeros, r"row 0: position 0 .*are not distinct"),
    ],
    ids=["prefix", "predictor", "leaf-start", "first", "range", "padding", "twice", "uncovered", "pad", "zeros"],
)
def test_wrong_routes_are_refused_and_named(tmp_path: Path, change: Callable[[Columns], None], told: str) -> None:
    with pytest.raises(BatchError, match=told):
        write(tmp_path, change).read(SHAPE)


def test_only_many_zero_routes_with_one_expert_a_token_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short row may all go to expert 0, which ingest takes."""
    shape = RouteShape(layers=2, topk=1, experts=8)

    def one_row(bundle: Columns) -> None:
        bundle["routes"][:, 1] = 0

    assert write(tmp_path / "right", shape=shape).read(shape).coverage
    assert write(tmp_path / "short", one_row, shape=shape).read(shape).coverage
    monkeypatch.setattr("artd_workers.trainer.batch.replay_bundle.FEW", 1)
    with pytest.raises(BatchError, match=r"row 1: all routes from position 0 .*trajectory 4.* on are 0"):
        write(tmp_path / "wrong", one_row, shape=shape).read(shape)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"version": 2}, "version is 2"),
        ({"run": "other"}, "run is other"),
        ({"step": 9}, "step is 9"),
        ({"token_digest": "f" * 64}, "token_digest is f"),
        ({"shape": RouteShape(layers=2, topk=2, experts=16)}, "shape is .*experts=16"),
        ({"rows": 3}, "rows is 3"),
        ({"row_length": 64}, "row_length is 64"),
        ({"tokens": 37}, "of 37 tokens, and the batch has 38"),
        ({"covered": 33}, "says 33 tokens have routes, its tensor 34"),
        ({"tensors": {}}, "no tensor routes"),
    ],
)
def test_a_bundle_of_another_batch_is_refused(tmp_path: Path, changes: dict, told: str) -> None:
    def say(manifest: ReplayManifest) -> ReplayManifest:
        return msgspec.structs.replace(manifest, **changes)

    with pytest.raises(BatchError, match=told):
        write(tmp_path, say=say).read(SHAPE)


def test_damage_is_seen(tmp_path: Path) -> None:
    written = write(tmp_path)
    data = bytearray(written.replay.tensors.read_bytes())
    data[-1] ^= 1
    (tmp_path / "flipped").write_bytes(data)
    with pytest.raises(BatchError, match=r"(routes|covered) of the replay bundle does not have the sha256"):
        written.read(SHAPE, replace(written.replay, tensors=tmp_path / "flipped"))
    (tmp_path / "cut").write_bytes(data[:-9])
    with pytest.raises(BatchError, match="cannot be read"):
        written.read(SHAPE, replace(written.replay, tensors=tmp_path / "cut"))
    (tmp_path / "spaced").write_bytes(written.replay.manifest.read_bytes() + b" ")
    with pytest.raises(BatchError, match="does not have the sha256"):
        written.read(SHAPE, replace(written.replay, manifest=tmp_path / "spaced"))


def test_a_bundle_of_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchError, match="shape is"):
        write(tmp_path).read(RouteShape(layers=3, topk=2, experts=8))


def test_replay_needs_a_bundle_and_a_bundle_needs_replay(tmp_path: Path) -> None:
    written = write(tmp_path / "moe")
    with pytest.raises(BatchError, match="expert_replay is on, and the batch has no replay bundle"):
        read_batch(written.batch, written.manifest, written.sha, 1024, SHAPE)
    with pytest.raises(BatchError, match="this run replays no experts"):
        written.read(None)
    plain = rig.save_columns(tmp_path, "dense", COLUMNS, TRAJECTORIES)
    with pytest.raises(BatchError, match="expert_replay is on"):
        read_batch(plain.tensors, plain.manifest, plain.sha, 1024, SHAPE, written.replay)
    batch = read_batch(plain.tensors, plain.manifest, plain.sha, 1024)
    assert batch.coverage is None and all(row.routes is None for row in batch.rows)

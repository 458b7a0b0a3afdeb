"""An engine that pulls from several trainer processes at once: two feeds whose pieces lie between each other, over plain memory."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from artd_schema.wire.direct import Run
from artd_workers.engines.adapter import Fence
from artd_workers.engines.gate import FenceError
from artd_workers.engines.pull.pull import _grids, _join_copies
from artd_workers.engines.pull.session import WrongWeights
from artd_workers.engines.pull.staging import join_rows
from artd_workers.engines.vllm.direct import extension
from artd_workers.engines.vllm.direct.extension import DirectExtension
from artd_workers.transfer.checksum import Span
from artd_workers.transfer.contracts import PullError
from artd_workers.transfer.coverage import CoverError
from tests.awake import wait_until
from tests.direct_rig import MemoryQueue

from .feeds_rig import BUFFERS, CUT, ROWS, SOON_S, WIDTH, Team

pytestmark = pytest.mark.torch


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    one = Team(tmp_path)
    yield one
    one.session.close()
    assert one.port.opened == []


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for the second of the trainer's."""
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


# ---- what is right ----------------------------------------------------------------------------------------------------


def test_two_feeds_fill_the_engine_bit_for_bit(team: Team) -> None:
    team.open()
    assert len(team.port.opened) == 2 * (1 + BUFFERS)
    for _ in range(3):
        team.pull()
        assert team.same()
        assert [side.page.done for side in team.sides] == [4, 2]
        team.session.check()
        team.renew()
        team.expect()
        with pytest.raises(WrongWeights):
            team.session.check()


def test_feeds_are_pulled_side_by_side(team: Team) -> None:
    """Each process fills its next buffer only when the engine has copied as many of the other's."""
    pages = [side.page for side in team.sides]
    team.sides[0].fill_slot = lambda slot: wait_until(
        lambda: team.stop.is_set() or pages[1].done >= min(slot, 2), SOON_S
    )
    team.sides[1].fill_slot = lambda slot: wait_until(lambda: team.stop.is_set() or pages[0].done >= slot + 1, SOON_S)
    team.open()
    team.pull()
    assert team.same()


def test_staged_nothing_is_touched_before_the_swap_and_no_row_is_copied_by_itself(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    team.open()
    team.pull()
    before = [tensor.clone() for tensor in team.tensors]
    team.renew()
    team.expect()
    tables: list[Any] = []
    monkeypatch.setattr(team.port, "sums", lambda spans: (tables.append(spans), spans)[1])
    fence = team.push(team.stage)
    assert all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(team.tensors, before, strict=True))
    team.session.swap(fence)
    assert team.same()
    *_, moved = tables
    assert sorted((span.part, span.width, span.words) for span in moved) == [
        *((expert, 0, ROWS * WIDTH // 4) for expert in range(3)), (3, 0, 4 * WIDTH // 4), (3, 0, 6 * WIDTH // 4), (4, 0, WIDTH // 4)
    ]  # fmt: skip
    team.renew()
    team.expect()
    team.session.swap(team.push(team.stage))
    assert team.same()


def test_rows_that_go_on_are_one_copy(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's experts lie one behind the other: no copy for each."""
    lying = team.sides[1]
    lying._lying += lying._slots
    lying._slots = []
    calls: list[tuple[int, ...]] = []
    copy2d = MemoryQueue.copy2d

    def counted(self: MemoryQueue, *rest: int) -> None:
        calls.append(rest[3:])
        copy2d(self, *rest)

    monkeypatch.setattr(MemoryQueue, "copy2d", counted)
    team.open()
    team.pull()
    assert team.same()
    assert sorted(calls) == [(2 * CUT, 2), (2 * CUT, 4), (2 * CUT, 6), (2 * CUT, 6), (2 * (WIDTH - CUT), 18)]


def test_rows_are_joined_within_a_tensor_and_where_both_sides_go_on() -> None:
    """Rows of 8 elements, 24 apart, of 2 bytes."""
    first, second = Run(0, 0, 0, 0, 0, 0, 16, 8, 24), Run(0, 48, 1, 0, 0, 32, 8, 8, 24)
    assert _grids([first, second], [1000, 5000], [500], 2) == [(1000, 48, 500, 16, 3)]
    alone = (1000, 48, 500, 16, 2)
    for change in ({"byte": 48}, {"at": 56}, {"pitch": 32}, {"width": 4}, {"segment": 1}, {"tensor": 1}):
        other = msgspec.structs.replace(second, **change)
        assert _grids([first, other], [1000, 1000], [500, 500], 2)[0] == alone
    assert (
        _join_copies([first, second], [1000], [500], 2)
        == _grids([msgspec.structs.replace(first, width=0)], [1], [1], 2)
        == []
    )


def test_only_the_rows_of_a_whole_part_are_one_span() -> None:
    left, right = Span(1000, 0, 6, 0, 5000, 2, 4, 4), Span(1016, 2, 6, 0, 5016, 2, 4, 4)
    assert join_rows([right, left]) == [Span(1000, 0, 12, 0, 5000)]
    apart = [
        [left],
        [right],
        [left, replace(right, part=1)],
        [left, replace(right, other=6000)],
        [left, replace(right, first=6)],
    ]
    for spans in apart:
        assert join_rows(spans) == spans


# ---- what is wrong ----------------------------------------------------------------------------------------------------


def test_an_offer_that_is_not_whole_is_not_opened(team: Team) -> None:
    first, second = team.sides
    with pytest.raises(CoverError, match=f"engine's experts: elements {CUT} to {WIDTH - 1} are in no piece"):
        team.session.open(team.offer(first))
    with pytest.raises(CoverError, match=f"experts: elements 0 to {CUT - 1} are in no piece"):
        team.session.open(team.offer(second))
    second.edit = lambda run: msgspec.structs.replace(run, at=run.at - CUT) if run.part == 1 else run
    with pytest.raises(
        CoverError, match=f"experts: elements {ROWS * WIDTH} to {ROWS * WIDTH + CUT - 1} are in two pieces"
    ):
        team.session.open(team.offer())
    second.edit = lambda run: msgspec.structs.replace(run, part=5)
    with pytest.raises(CoverError, match="gives part 5"):
        team.session.open(team.offer())
    for edit in ({"segment": 3}, {"segment": -1}, {"byte": 1 << 20}, {"byte": -8}):
        second.edit = lambda run, edit=edit: msgspec.structs.replace(run, **edit)
        with pytest.raises(CoverError, match="outside of the memory"):
            team.session.open(team.offer())
    assert team.port.opened == []


def test_columns_from_the_wrong_places_are_refused_by_the_sums(team: Team) -> None:
    """Right pieces, but a process holds the columns of another expert."""
    team.open()
    team.sides[1]._slots.reverse()
    with pytest.raises(WrongWeights, match="2 of 5 .* first is expert.1"):
        team.pull()
    with pytest.raises(FenceError, match="unknown"):
        team.pull()


def test_one_that_fails_ends_the_pull_when_nothing_runs_any_more(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    settled: list[int] = []
    queues: list[MemoryQueue] = []
    monkeypatch.setattr(MemoryQueue, "settle", lambda queue: settled.append(id(queue)))
    monkeypatch.setattr(team.port, "queue", lambda: (queues.append(MemoryQueue()), queues[-1])[1])
    team.open()
    team.sides[1].fill_slot = lambda slot: team.sides[1].page.fail() or team.stop.set() if slot else None
    with pytest.raises(PullError, match="failed to fill"):
        team.pull()
    assert set(settled) == {id(queue) for queue in queues} and len(queues) == 4
    assert team.port.opened, "they are the trainer's until it ends or offers anew"
    with pytest.raises(FenceError, match="unknown"):
        team.session.pull(team.fence(), 1.0)


def test_one_that_is_silent_ends_the_pull_at_its_deadline(team: Team, other: subprocess.Popen[bytes]) -> None:
    team.open(pids=(None, other.pid))
    with pytest.raises(PullError, match=rf"1.5 s passed .* for fence 1 \(pid {other.pid}\)"):
        team.pull(1.5, team.sides[:1])
    assert team.sides[1].page.done == 0


@pytest.mark.parametrize("staged", [False, True])
def test_the_end_of_one_process_ends_the_pull_and_closes_all(
    team: Team, other: subprocess.Popen[bytes], staged: bool
) -> None:
    team.open(pids=(None, other.pid))
    assert team.port.opened

    def call(fence: Fence) -> None:
        threading.Timer(0.05, other.kill).start()
        if staged:
            team.session.stage(fence, 60.0)
            wait_until(lambda: not team.port.opened, SOON_S)
            team.session.poll_staging()
        team.session.pull(fence, 60.0)

    with pytest.raises(PullError, match="nothing is staged" if staged else f"process ended .*pid {other.pid}"):
        team.push(call, team.sides[:1])
    wait_until(lambda: not team.port.opened, SOON_S)
    if staged:  # the weights were never touched
        team.open()
        team.pull()
        assert team.same()


def test_the_end_of_a_process_that_has_given_all_ends_the_pull_too(team: Team, other: subprocess.Popen[bytes]) -> None:
    """Its memory was read by copies that may still run."""
    team.open(pids=(None, other.pid))
    pages = [side.page for side in team.sides]

    def late(slot: int) -> None:
        if slot == 3:
            wait_until(lambda: pages[1].done == 2, SOON_S)
            other.kill()
            team.stop.wait(SOON_S)

    team.sides[0].fill_slot = late
    with pytest.raises(PullError, match=f"pid {other.pid}"):
        team.pull()


def test_one_that_cannot_be_opened_leaves_nothing_open(team: Team, other: subprocess.Popen[bytes]) -> None:
    offer = team.offer(pids=(None, other.pid))
    other.kill()
    other.wait()
    with pytest.raises(PullError, match=rf"\(pid {other.pid}\) that made this offer has ended"):
        team.session.open(offer)
    assert team.port.opened == []
    team.sides[1].page.path.rename(team.sides[1].page.path.with_name("elsewhere"))
    with pytest.raises(FileNotFoundError):
        team.session.open(team.offer(pids=(None, os.getpid())))
    assert team.port.opened == []


def test_every_mapping_is_closed_though_one_cannot_be(team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    close = team.port.close

    def failing(address: int) -> None:
        close(address)
        if len(team.port.opened) == 3:
            raise OSError("no such mapping")

    monkeypatch.setattr(team.port, "close", failing)
    team.open()
    with pytest.raises(OSError, match="no such mapping"):
        team.session.close()
    assert team.port.opened == []


# ---- the calls --------------------------------------------------------------------------------------------------------


def test_another_spawns_harness_neither_opens_nor_expects(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would close the feeds under a push, or have it wait for other sums."""
    monkeypatch.setenv("ARTD_INSTANCE", "i")
    monkeypatch.setenv("ARTD_SPAWN", "7")
    worker = DirectExtension()
    worker._artd_session = team.session
    path = tmp_path / "offer"
    path.write_bytes(msgspec.msgpack.encode(team.offer()))
    assert worker.artd_direct_open(str(path), 1.0, "i/7")["segments"] == 6
    for call in (
        lambda: worker.artd_direct_open(str(path), 1.0, "i/6"),
        lambda: worker.artd_direct_expect("none", "j/7"),
    ):
        with pytest.raises(FenceError, match="belongs to instance and spawn i/7"):
            call()
    assert team.port.opened


def test_the_model_is_surveyed_once_for_table_and_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """And again for every table that is asked for: what is found is what is there then."""
    asked: list[Any] = []
    table = msgspec.json.decode(
        b'{"engine":"vllm","version":"0","moe_backend":"","tensors":[],"obstacles":[["a","b"]]}',
        type=extension.EngineTable,
    )
    monkeypatch.setattr(extension, "table_of", lambda worker: (asked.append(worker), table)[1])
    worker = DirectExtension()
    worker.artd_direct_table()
    with pytest.raises(extension.NotDirect, match="a: b"):
        worker.artd_direct_room()
    assert len(asked) == 1
    worker.artd_direct_table()
    assert len(asked) == 2

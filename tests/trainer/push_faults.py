"""Faults planted in one rank's part of a push. They are in force inside `of` only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from artd_schema.wire.direct import Feed, Run
from artd_workers.trainer.push import rank_shards, serving
from artd_workers.trainer.push.direct.feeder import Feeder
from artd_workers.trainer.push.direct.layout import WHOLE


@contextmanager
def of(name: str | None, rank: int) -> Iterator[None]:
    """Faults are rank 1's."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None and rank == 1:
            FAULTS[name](patch)
        yield


def _twice(patch: pytest.MonkeyPatch) -> None:
    """It gives what another has given."""
    share = rank_shards._shard
    patch.setattr(rank_shards, "_shard", lambda row, parallel: share(row, parallel) or WHOLE)


def _missing(patch: pytest.MonkeyPatch) -> None:
    """A tensor of which it has a part is not given."""
    whole = serving.own_shards

    def less(*rest: Any) -> Any:
        codec, shares = whole(*rest)
        return replace(codec, rows=codec.rows[:-1]), shares

    patch.setattr(serving, "own_shards", less)


def _column(patch: pytest.MonkeyPatch) -> None:
    """It takes its columns for the first ones."""
    share = rank_shards._shard

    def first(*rest: Any) -> Any:
        found = share(*rest)
        return replace(found, index=0) if found is not None and found.dim == 1 else found

    patch.setattr(rank_shards, "_shard", first)


def _offers(change: Callable[[Run], Run | None]) -> Callable[[pytest.MonkeyPatch], None]:
    """What it offers is not what it planned, in the first run with rows."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        offered = Feeder.own_feed

        def given_(source: Feeder) -> Feed:
            feed, done = offered(source), False
            units = []
            for unit in feed.units:
                runs = []
                for run in unit.runs:
                    new: Run | None = run
                    if run.width and not done:
                        new, done = change(run), True
                    runs += [new] if new is not None else []
                units.append(msgspec.structs.replace(unit, runs=tuple(runs)))
            return msgspec.structs.replace(feed, units=tuple(units))

        patch.setattr(Feeder, "own_feed", given_)

    return plant


def _moved(run: Run) -> Run:
    return msgspec.structs.replace(run, at=run.at - run.width, first=run.first - run.width)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "twice": _twice,
    "missing": _missing,
    "column": _column,
    "offer lacks a run": _offers(lambda run: None),
    "offer has another column": _offers(_moved),
}

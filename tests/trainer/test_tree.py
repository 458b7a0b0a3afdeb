"""Tree-packed rows against separate sequences: logprobs and gradients; and that wrong masks, positions, temperatures show."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from artd_workers.trainer.batch.rows import BatchError, PackedRow
from artd_workers.trainer.model.model import Policy
from artd_workers.trainer.tree_mask import chain

from . import rig
from .rig import Piece

pytestmark = pytest.mark.torch
_G = torch.Generator().manual_seed(9)


def ids(n: int) -> Tensor:
    return torch.randint(3, 1024, (n,), generator=_G)


PROMPT, DEEPER, OTHER = ids(20), ids(7), ids(11)
LEAVES = [ids(9), ids(12), ids(5), ids(8)]
PIECES = [
    Piece(PROMPT),
    Piece(LEAVES[0], parent=0, trained_from=1, temperature=0.7),
    Piece(DEEPER, parent=0),
    Piece(LEAVES[1], parent=2, trained_from=4, temperature=1.0),
    Piece(LEAVES[2], parent=2, trained_from=1, temperature=1.3),
    Piece(torch.cat([OTHER, LEAVES[3]]), trained_from=11, temperature=1.0),
]
SEPARATE = [
    (torch.cat([PROMPT, LEAVES[0]]), 21, 0.7),
    (torch.cat([PROMPT, DEEPER, LEAVES[1]]), 31, 1.0),
    (torch.cat([PROMPT, DEEPER, LEAVES[2]]), 28, 1.3),
    (torch.cat([OTHER, LEAVES[3]]), 11, 1.0),
]


def packed_logprobs(policy: Policy, row: PackedRow) -> Tensor:
    return policy.score(row.tokens, row.positions, row.hidden_from, row.at, row.targets, row.temperatures).logprobs


def separate_logprobs(policy: Policy) -> Tensor:
    parts = []
    for tokens, first, temperature in SEPARATE:
        size = len(tokens)
        mask = torch.ones(size, size, dtype=torch.bool).triu(1)
        at = torch.arange(first - 1, size - 1)
        heat = torch.full((len(at),), temperature)
        parts.append(policy.score(tokens, torch.arange(size), mask, at, tokens[first:], heat).logprobs)
    return torch.cat(parts)


def gradients(policy: Policy, loss: Tensor) -> dict[str, Tensor]:
    parameters = dict(policy.lora.list_parameters())
    return dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))


def test_packed_equals_separate(folder: Path) -> None:
    policy, row = rig.make_policy(folder), rig.only_row(PIECES, 96)
    assert len(row.tokens) == sum(len(piece.tokens) for piece in PIECES)
    packed, separate = packed_logprobs(policy, row), separate_logprobs(policy)
    assert (packed - separate).abs().max() <= 1e-5
    weights = torch.linspace(-1, 1, len(packed))
    found, wanted = gradients(policy, (packed * weights).sum()), gradients(policy, (separate * weights).sum())
    assert max(rig.relative(found[name], wanted[name]) for name in wanted) <= 1e-5


BREAKS = {
    "plain causal mask": lambda r: replace(r, until=chain(len(r.until))),
    "no look at the segment above": lambda r: replace(r, until=torch.cat((torch.arange(1, 21), r.until[20:]))),
    "positions of the row": lambda r: replace(r, positions=torch.arange(len(r.positions))),
    "temperature 1": lambda r: replace(r, temperatures=torch.ones_like(r.temperatures)),
    "logits one token late": lambda r: replace(r, at=r.at + 1),
}


@pytest.mark.parametrize("name", sorted(BREAKS))
def test_a_wrong_row_is_seen(toy_folders: dict[str, Path], name: str) -> None:
    policy = rig.make_policy(toy_folders["qwen3"])
    row = BREAKS[name](rig.only_row(PIECES, 96))
    with torch.no_grad():
        assert (packed_logprobs(policy, row) - separate_logprobs(policy)).abs().max() > 1e-3


def test_mask_by_brute_force() -> None:
    """Against the rule written down token by token."""
    columns = rig.row_columns(PIECES, 96)
    row = rig.batch_of([columns], 4).rows[0]
    segments, parents = columns["segment_ids"].tolist(), columns["parent_ids"].tolist()

    def line(i: int) -> set[int]:
        found, segment = set(), segments[i]
        while segment not in found:
            found.add(segment)
            segment = parents[segments.index(segment)]
        return found

    for q in range(len(row.tokens)):
        seen = {k for k in range(len(row.tokens)) if k <= q and segments[k] in line(q)}
        assert {k for k, hidden in enumerate(row.hidden_from[q].tolist()) if not hidden} == seen


def test_mask_of_one_segment_is_causal() -> None:
    mask = rig.tree_mask(torch.zeros(5, dtype=torch.int64), {0: {0}})
    assert torch.equal(mask, torch.ones(5, 5, dtype=torch.bool).triu(1))


def _set(columns: dict[str, Tensor], name: str, index: int, value: float) -> None:
    columns[name][index] = value


BAD = {
    "begins its segment": lambda c: [_set(c, n, 20, v) for n, v in (("loss_mask", 1), ("old_logprobs", -1))],
    "temperature 0": lambda c: _set(c, "temperatures", 22, 0),
    "positive": lambda c: _set(c, "old_logprobs", 22, 0.5),
    "old_logprobs of a trained token is not finite": lambda c: _set(c, "old_logprobs", 22, float("nan")),
    "advantages of a trained token is not finite": lambda c: _set(c, "advantages", 22, float("inf")),
    "vocabulary": lambda c: _set(c, "tokens", 3, 1024),
    "positions of segment 1": lambda c: _set(c, "position_ids", 21, 5),
    "preorder": lambda c: [
        c["parent_ids"].__setitem__(slice(36, 48), 1),
        c["position_ids"].__setitem__(slice(36, 48), torch.arange(29, 41).int()),
    ],
    "not one run": lambda c: _set(c, "segment_ids", 25, 0),
    "more than one parent": lambda c: _set(c, "parent_ids", 22, 1),
    "does not come before": lambda c: c["parent_ids"].__setitem__(slice(20, 29), 4),
    "no trajectory": lambda c: _set(c, "trajectory_index", 22, 4),
    "padded position is marked": lambda c: _set(c, "loss_mask", 95, 1),
    "one tail": lambda c: _set(c, "segment_ids", 3, -1),
    "no token of the batch": lambda c: c["loss_mask"].zero_(),
}


@pytest.mark.parametrize("message", sorted(BAD))
def test_bad_rows_are_named(message: str) -> None:
    columns = rig.row_columns(PIECES, 96)
    BAD[message](columns)
    with pytest.raises(BatchError, match=message):
        rig.batch_of([columns], 4)

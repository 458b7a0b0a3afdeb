"""`python -m artd_workers.trainer.tools.score FOLDER`: scores sequences with a committed checkpoint, with router replay and
without.

It is the trainer's side of `artctl mismatch`, in the layout of `artd_schema.wire.score`. It writes only `scores.safetensors` to the
folder, after everything is scored. The weights are the fp32 masters that training starts from (base and adapter unmerged, or
every parameter), whatever the engine serves. Both passes run in one process with the same threads.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from artd_schema.codec import UNREADABLE
from artd_schema.wire.score import LIVE, REPLAY, REQUEST, SCORES, SEQUENCES, Pass, ScoreRequest
from artd_workers.models import registry
from artd_workers.trainer.model.logits import chunks
from artd_workers.trainer.tree_mask import chain

if TYPE_CHECKING:
    from artd_workers.trainer.model.model import Policy


class ScoreError(ValueError):
    """The folder does not hold what it should; the text names the file and what is wrong with it."""


@dataclass(frozen=True)
class Piece:
    """One sequence: `tokens` int64 [s], of which those from `prompt` on are scored.

    `candidates`: int64 [s - prompt, K] ids that are scored in their place too. `routes`: [MoE layers, s - 1, topk] of all but
    the last token, or None.
    """

    tokens: Tensor
    prompt: int
    candidates: Tensor
    routes: Tensor | None


def read_pieces(folder: Path, request: ScoreRequest, vocab_size: int) -> list[Piece]:
    """Read the sequences of a folder. Raises ScoreError."""
    path = folder / SEQUENCES
    try:
        columns = load_file(path)
        tokens, lengths, prompts, candidates = (
            columns[name].long() for name in ("tokens", "lengths", "prompts", "candidates")
        )
        routes = columns["routes"] if request.routes is not None else None
    except (OSError, SafetensorError, KeyError) as error:
        raise ScoreError(f"{path} cannot be read: {error!r}") from None
    if len(lengths) != len(prompts) or int(lengths.sum()) != len(tokens) or not len(tokens):
        raise ScoreError(f"{path}: lengths do not add up to the tokens")
    if bool((prompts < 1).any()) or bool((prompts >= lengths).any()):
        raise ScoreError(f"{path}: a prompt is empty, or nothing comes after it")
    if len(candidates) != int((lengths - prompts).sum()) or candidates.ndim != 2:
        raise ScoreError(f"{path}: candidates {tuple(candidates.shape)} are not one row for each scored token")
    if min(int(tokens.min()), int(candidates.min())) < 0 or max(int(tokens.max()), int(candidates.max())) >= vocab_size:
        raise ScoreError(f"{path}: an id lies outside the vocabulary of {vocab_size}")
    if routes is not None:
        _check_routes(path, request, routes, len(tokens))
    return list(_cut(tokens, lengths.tolist(), prompts.tolist(), candidates, routes))


def _check_routes(path: Path, request: ScoreRequest, routes: Tensor, tokens: int) -> None:
    shape = request.routes
    assert shape is not None
    if tuple(routes.shape) != (tokens, shape.layers, shape.topk):
        raise ScoreError(f"{path}: routes {tuple(routes.shape)} are not {(tokens, shape.layers, shape.topk)}")
    ids = routes.to(torch.int32).sort(-1).values
    if int(ids.max()) >= shape.experts or bool((ids[..., 1:] == ids[..., :-1]).any()):
        raise ScoreError(f"{path}: a token's routes are not {shape.topk} different experts of {shape.experts}")


def _cut(
    tokens: Tensor, lengths: list[int], prompts: list[int], candidates: Tensor, routes: Tensor | None
) -> Iterator[Piece]:
    start = row = 0
    for length, prompt in zip(lengths, prompts, strict=True):
        end, until = start + length, row + length - prompt
        # torch lacks most kernels for uint16.
        part = None if routes is None else routes[start : end - 1].to(torch.int32).transpose(0, 1).contiguous()
        yield Piece(tokens[start:end], prompt, candidates[row:until], part)
        start, row = end, until


@torch.no_grad()
def score(policy: Policy, pieces: list[Piece], way: Pass) -> dict[str, Tensor]:
    """Score all pieces in one pass. Returns the columns of `artd_schema.wire.score`, without the pass's name."""
    found: dict[str, list[Tensor]] = {"logprobs": [], "candidates": [], "top_ids": [], "top_logprobs": []}
    for piece in pieces:
        size, targets = len(piece.tokens) - 1, piece.tokens[piece.prompt :, None]
        at, routes = torch.arange(piece.prompt - 1, size), piece.routes if way == REPLAY else None

        def read(hidden: Tensor, weight: Tensor, piece: Piece = piece, targets: Tensor = targets) -> Tensor:
            """Score in chunks, so that the logits of a long sequence never exist all at once."""
            for here in chunks(len(hidden)):
                logprobs = (hidden[here] @ weight.t()).float().log_softmax(-1)
                top = logprobs.topk(piece.candidates.shape[1], -1)
                found["logprobs"].append(logprobs.gather(-1, targets[here])[:, 0])
                found["candidates"].append(logprobs.gather(-1, piece.candidates[here]))
                found["top_ids"].append(top.indices.int())
                found["top_logprobs"].append(top.values)
            return hidden

        policy.project_rows(piece.tokens[:-1], torch.arange(size), chain(size), at, routes, read)
    return {name: torch.cat(parts) for name, parts in found.items()}


def answer(folder: Path) -> None:
    """Read the folder's request, score, and write the scores. Raises ScoreError, CheckpointError, ValueError, OSError."""
    try:
        request = msgspec.json.decode((folder / REQUEST).read_bytes(), type=ScoreRequest)
    except (OSError, *UNREADABLE) as error:
        raise ScoreError(f"{folder / REQUEST} cannot be read: {error}") from None
    logging.getLogger("megatron").setLevel(logging.ERROR)
    # Megatron warns of each accelerator package that a CPU does not need.
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    from artd_workers.trainer.placement import prepare

    prepare(request.spec)
    from artd_workers.trainer.checkpoint import folder as checkpoint
    from artd_workers.trainer.parameters.trained import open_model

    torch.set_num_threads(request.spec.threads or len(os.sched_getaffinity(0)))
    registry.adopt(request.family)
    policy, trained = open_model(request.spec)
    if request.checkpoint is None:
        trained.initialise(request.spec.seed)
    else:
        trained.load(checkpoint.read(request.checkpoint, trained.file).weights)
    pieces = read_pieces(folder, request, policy.plan.vocab_size)
    passes = (REPLAY, LIVE) if request.routes is not None else (LIVE,)
    columns = {f"{way}.{name}": column for way in passes for name, column in score(policy, pieces, way).items()}
    save_file(columns, folder / SCORES)


def main() -> int:
    parser = argparse.ArgumentParser(description="Score the sequences of a folder (artd_schema/wire/score.py).")
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    try:
        answer(args.folder)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Batches for the GPU scripts: random trajectories through the real packer, and the routes that a model's routers take.

Owner of: no state. Invariants: seeded; a batch is read back through the trainer's own checks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from artd.packing.batch import PackSpec, Source, pack
from artd.packing.tensors import serialise
from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest
from artd_schema.data.trajectory import Sampling, Turn
from artd_workers.trainer.batch.rows import Batch, PackedRow, make_batch
from artd_workers.trainer.model.model import Policy


def packed(
    groups: int, members: int, prompt: int, answer: int, length: int, vocab: int, seed: int = 0, shared: bool = True
) -> Batch:
    """Groups of `members` answers of `answer` tokens to one prompt each, in rows of at most `length` tokens.

    shared: a group has one prompt; otherwise each answer's prompt begins with another token, so that none is shared.
    """
    columns, manifest = drawn(groups, members, prompt, answer, length, vocab, seed, shared)
    tensors = {name: torch.from_numpy(array.copy()) for name, array in columns.items()}
    return make_batch(tensors, manifest, digest(to_json(manifest)), vocab)


def drawn(
    groups: int, members: int, prompt: int, answer: int, length: int, vocab: int, seed: int = 0, shared: bool = True
) -> tuple[dict[str, Any], BatchManifest]:
    """Such a batch as the packer gives it."""
    generator = torch.Generator().manual_seed(seed)
    sources = []
    for group in range(groups):
        asked = torch.randint(3, vocab, (prompt,), generator=generator, dtype=torch.int32)
        for member in range(members):
            said = torch.randint(3, vocab, (answer,), generator=generator, dtype=torch.int32)
            logprobs = -torch.rand(answer, generator=generator) - torch.tensor(float(vocab)).log()
            number = group * members + member
            if not shared:
                asked[0] = 3 + number
            turn = Turn(
                prompt_ids=asked.numpy().tobytes(), token_ids=said.numpy().tobytes(),
                logprobs=logprobs.numpy().tobytes(), sampling=Sampling(temperature=1.0), policy_epoch=((0, 0),),
            )  # fmt: skip
            body = msgspec.msgpack.encode([turn])
            # A group of one has no advantage of its own: neighbours in pairs.
            owner = group + 1 if members > 1 else group // 2 + 1
            sources.append(Source(id=number + 1, group=owner, reward=float(number % 2), digest=digest(body), body=body))
    spec = PackSpec(run="gpu", step=1, seed=seed, row_length=length, scale_rewards=True, base_digest="base")
    columns, manifest, _ = pack(spec, sources)
    return columns, manifest


def written(folder: Path, name: str, columns: dict[str, Any], manifest: BatchManifest) -> dict[str, str]:
    """A batch's files as a daemon writes them; gives the fields of a Run that name them."""
    tensors, described, raw = folder / f"{name}.safetensors", folder / f"{name}.json", to_json(manifest)
    tensors.write_bytes(serialise(columns))
    described.write_bytes(raw)
    return {"batch": str(tensors), "manifest": str(described), "batch_sha": digest(raw)}


@torch.no_grad()
def routes_of(policy: Policy, row: PackedRow) -> Tensor:
    """Expert ids uint8 [MoE layers, s, topk] that the live routers choose for a row."""
    routers = [module for module in policy.model.modules() if getattr(module, "router_replay", None) is not None]
    found: dict[int, Tensor] = {}

    def keep(router: torch.nn.Module, _args: object, output: tuple[Tensor, Tensor]) -> None:
        used = output[1]  # a map over all experts, or the experts themselves
        chosen = used.nonzero()[:, 1].view(len(used), -1) if used.dtype == torch.bool else used
        found[router.layer_number] = chosen.to(torch.uint8).cpu()

    hooks = [router.register_forward_hook(keep) for router in routers]
    try:
        policy.hidden_logits(row.tokens, row.positions, row.until, row.at[:1])
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack([found[layer] for layer in sorted(found)])


def with_routes(policy: Policy, batch: Batch) -> Batch:
    """The batch with the live routers' routes to replay."""
    rows = tuple(replace(row, routes=routes_of(policy, row)) for row in batch.rows)
    return replace(batch, rows=rows, coverage=1.0)


def pairs(row: PackedRow) -> int:
    """(query, key) pairs that the mask shows."""
    return int((row.until - torch.arange(len(row.until))).sum())

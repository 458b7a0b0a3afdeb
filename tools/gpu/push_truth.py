"""What the engine computes after a push over NaN, against Hugging Face's own model with the exported weights.

Owner of: no state. Invariants: the reference knows the weights from the exported files alone; every difference stands beside what
bf16 alone makes of them: Hugging Face in bf16 against Hugging Face in fp32, and vLLM after its own loader, in the same run.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .push_rig import Line, Rig

Scored = list[tuple[list[int], list[float]]]
"""Each sequence with the logprob of every token but its first."""
PROMPTS, ANSWER = 8, 32
"""In small two of them, and four tokens."""


def truth(rig: Rig, _rounds: int) -> Iterator[Line]:
    """Prompts are one prefill, answers are decoded with CUDA graphs; both count."""
    count, tokens = (2, 4) if rig.tiny else (PROMPTS, ANSWER)
    prompts = rig.prompts[:count]
    rig.prepare()
    folder = Path("/dev/shm/artd-export") if not rig.tiny else rig.folder / "export"
    rig.trainer.export(folder)
    exact, rounded = (Reference(folder, dtype, rig.trainer.device) for dtype in (torch.float32, torch.bfloat16))
    rig.engine.rpc("probe_spoil")
    rig.push()
    direct = rig.engine.scored(prompts, tokens)
    noise = _apart(rounded.scored(direct), exact.scored(direct))
    yield {"what": "Hugging Face in bf16 against fp32", "tokens": sum(len(ids) - 1 for ids, _ in direct), **noise}
    found = _apart(direct, exact.scored(direct))
    yield {
        "what": "direct push over NaN against Hugging Face in fp32",
        **found,
        "of_noise": found["mean"] / noise["mean"],
    }
    yield {"what": "direct push over NaN against Hugging Face in bf16", **_apart(direct, rounded.scored(direct))}
    rig.engine.rpc("probe_spoil")
    rig.engine.rpc("probe_load", str(folder))
    stock = rig.engine.scored(prompts, tokens)
    again = _apart(stock, exact.scored(stock))
    yield {"what": "vLLM's own loader against Hugging Face in fp32", **again, "of_noise": again["mean"] / noise["mean"]}
    same = [ids for ids, _ in direct] == [ids for ids, _ in stock]
    yield {
        "what": "direct push against vLLM's own loader",
        "same_answers": same,
        **(_apart(direct, stock) if same else {}),
    }
    kept = rig.trainer.flat.clone()
    rig.trainer.flat.mul_(1.5)
    rig.prepare(change=False)
    rig.push()
    other = rig.engine.scored(prompts, tokens)
    wrong = _apart(other, exact.scored(other))
    yield {
        "what": "an adapter half as large again against the first's",
        **wrong,
        "of_noise": wrong["mean"] / noise["mean"],
    }
    rig.trainer.flat.copy_(kept)


def eager(config: Mapping[str, Any]) -> dict[str, str]:
    """For transformers: plain products, no kernels."""
    kinds = ("attn", "experts") if "num_experts" in config else ("attn",)
    return {f"{kind}_implementation": "eager" for kind in kinds}


class Reference:
    """The model of transformers with the weights of a folder, which must be all and no others."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        from transformers import AutoModelForCausalLM

        own = eager(json.loads((folder / "config.json").read_text()))
        made: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True, **own)
        model, told = made
        if told["missing_keys"] or told["unexpected_keys"] or told["mismatched_keys"]:
            raise ValueError(f"the export in {folder} is not what Hugging Face's model holds: {told}")
        self._model = model.to(device).eval()

    def scored(self, told: Scored) -> Scored:
        """The same sequences with its own logprobs."""
        return [(ids, logprobs(self._model, ids)) for ids, _ in told]


@torch.no_grad()
def logprobs(model: nn.Module, ids: Sequence[int]) -> list[float]:
    """Of every token but the first, in nats; the softmax in float64."""
    tokens = torch.tensor(ids, device=next(model.parameters()).device)
    scores = torch.log_softmax(model(tokens[None]).logits[0].double(), -1)
    return scores[:-1].gather(1, tokens[1:, None])[:, 0].tolist()


def _apart(ours: Scored, theirs: Scored) -> Line:
    """Absolute differences in nats over all tokens; NaN stays NaN."""
    pairs = (zip(a, b, strict=True) for (_, a), (_, b) in zip(ours, theirs, strict=True))
    gaps = torch.tensor([a - b for pair in pairs for a, b in pair], dtype=torch.float64).abs()
    return {"mean": gaps.mean().item(), "max": gaps.max().item()}

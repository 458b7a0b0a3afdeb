"""Hugging Face's logprobs and routes of token sequences: `MEGATRON_PYTHON routes_reference.py BASE CHECKPOINT`.

In, one line each: a JSON list of lists of token ids. Out, one line each, for every list: logprobs of tokens 1..n-1 (temperature
1); `chosen` [n][layer] = the experts of every token in rising order; `margin` [n][layer] = how much the last chosen router
logit exceeds the first that was not chosen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.engine.make_checkpoint import hugging_face


@torch.no_grad()
def answer(model: Any, sequence: list[int]) -> dict[str, Any]:
    ids = torch.tensor(sequence)
    out = model(ids[None], output_router_logits=True)
    scores = torch.log_softmax(out.logits[0].double(), -1)
    routers = torch.stack([logits for logits in out.router_logits if logits is not None], 1)
    topk = model.config.num_experts_per_tok
    best, chosen = routers.topk(topk + 1, -1)
    return {
        "logprobs": scores[:-1].gather(1, ids[1:, None])[:, 0].tolist(),
        "chosen": chosen[..., :topk].sort(-1).values.tolist(),
        "margin": (best[..., topk - 1] - best[..., topk]).tolist(),
    }


def main() -> None:
    base, checkpoint = sys.argv[1:]
    model = hugging_face(Path(base), load_file(Path(checkpoint) / "model.safetensors"))
    for line in sys.stdin:
        print(json.dumps([answer(model, sequence) for sequence in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()

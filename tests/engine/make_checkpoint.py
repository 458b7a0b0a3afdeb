"""Make committed checkpoint folders for a toy: `MEGATRON_PYTHON make_checkpoint.py BASE OUT:merged|lora:SEED:STEP ...`.

Stands in for the trainer in the engine's tests: random adapter, weight table, canary scored with Hugging Face.
Prints each manifest's sha256. Environment: PYTHONPATH with workers/ and schema/.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from artd_schema.codec import to_json
from artd_schema.manifest import Canary, CheckpointManifest, FileEntry, WeightEntry, WeightTable
from artd_workers.trainer.merge import PEFT_PREFIX, BaseWeights, merged_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8


def adapter(base: BaseWeights, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name in base:
        if name.split(".")[-2] in TARGETS:
            rows, columns = base[name].shape
            stem = PEFT_PREFIX + name.removesuffix(".weight")
            out[stem + ".lora_A.weight"] = torch.randn(RANK, columns, generator=generator) * 0.1
            out[stem + ".lora_B.weight"] = torch.randn(rows, RANK, generator=generator) * 0.1
    return out


def entry(name: str, tensor: Tensor) -> WeightEntry:
    sha = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return WeightEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sha)


def canary(base: Path, merged: dict[str, Tensor]) -> Canary:
    """Logprobs of Hugging Face with the merged weights."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    missing, unexpected = model.load_state_dict(merged, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=generator) for n in (24, 17, 32)]
    logprobs = []
    with torch.no_grad():
        for ids in prompts:
            scores = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
            logprobs.append(tuple(scores[:-1].gather(1, ids[1:, None])[:, 0].tolist()))
    rows = tuple(tuple(ids.tolist()) for ids in prompts)
    return Canary(prompts=rows, logprobs=tuple(logprobs), max_abs=1e-5, mean_abs=2e-6)


def write(base_folder: Path, out: Path, mode: str, seed: int, step: int) -> str:
    """Write one checkpoint folder; returns the sha256 of its manifest."""
    out.mkdir(parents=True)
    base = BaseWeights(base_folder)
    lora = adapter(base, seed)
    merged = dict(merged_tensors(base, lora, ALPHA / RANK, torch.float32))
    save_file(lora, out / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
                "bias": "none", "target_modules": list(TARGETS), "base_model_name_or_path": str(base_folder)}  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(settings))
    served = merged if mode == "merged" else lora
    table = WeightTable(mode=mode, tensors=tuple(entry(name, tensor) for name, tensor in served.items()))
    (out / "weights.json").write_bytes(to_json(table))
    files = tuple(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(out.iterdir())
    )
    manifest = CheckpointManifest(
        run="toy", step=step, epoch=step, lineage=0, parent="", batch="", base_digest="", spec_digest="",
        instance="test", job=1, fence=1, files=files, canary=canary(base_folder, merged),
    )  # fmt: skip
    raw = to_json(manifest)
    (out / "manifest.json").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def main() -> None:
    base, *wanted = sys.argv[1:]
    for item in wanted:
        out, mode, seed, step = item.split(":")
        print(write(Path(base), Path(out), mode, int(seed), int(step)))


if __name__ == "__main__":
    main()

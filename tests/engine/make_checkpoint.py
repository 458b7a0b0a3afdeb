"""Make committed checkpoint folders for a toy: `MEGATRON_PYTHON make_checkpoint.py BASE OUT:merged|lora|full:SEED:STEP[:gpu] ...`.

Stands in for the trainer in the engine's tests: random adapter or, in `full`, every weight off by noise; weight table; canary
scored with Hugging Face in fp32. gpu: served in bf16, known by sum64, and a canary with the room that takes. Prints each manifest's sha256. Environment: PYTHONPATH with workers/ and schema/.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from artd_schema.codec import to_json
from artd_schema.manifest import Canary, CheckpointManifest, FileEntry, WeightEntry, WeightTable
from artd_workers.engines.direct.checksum import sum_of
from artd_workers.trainer.merge import PEFT_PREFIX, BaseWeights, merged_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
FP32, BF16 = (1e-5, 2e-6), (4.0, 0.15)
"""Bounds: a token whose expert is another by rounding is off by up to 1.6; another checkpoint of a toy by 1.3 in the mean."""


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


def entry(name: str, tensor: Tensor, summed: bool = False) -> WeightEntry:
    if summed:
        return WeightEntry(name, "bfloat16", tuple(tensor.shape), sum64=sum_of(tensor.contiguous()))
    sha = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
    return WeightEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), sha)


def every_weight(base: BaseWeights, seed: int) -> dict[str, Tensor]:
    """The base's weights, each matrix with noise of half its own size."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name in base:
        weight = base[name].float()
        noise = torch.randn(weight.shape, generator=generator) * weight.std() * 0.5
        out[name] = weight + noise if weight.ndim > 1 else weight
    return out


def hugging_face(base: Path, weights: dict[str, Tensor]) -> Any:
    """The base's model with these weights, which must be all and no others, in fp32."""
    with tempfile.TemporaryDirectory() as folder:
        save_file(weights, Path(folder, "model.safetensors"), metadata={"format": "pt"})
        shutil.copyfile(base / "config.json", Path(folder, "config.json"))
        model, told = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not told["unexpected_keys"] and set(told["missing_keys"]) <= {"lm_head.weight"}, told
    return model.eval()


def canary(base: Path, merged: dict[str, Tensor], bounds: tuple[float, float]) -> Canary:
    """Logprobs of Hugging Face with the merged weights. bounds: largest and mean difference in nats."""
    model = hugging_face(base, merged)
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, model.config.vocab_size, (n,), generator=generator) for n in (24, 17, 32)]
    logprobs = []
    with torch.no_grad():
        for ids in prompts:
            scores = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
            logprobs.append(tuple(scores[:-1].gather(1, ids[1:, None])[:, 0].tolist()))
    rows = tuple(tuple(ids.tolist()) for ids in prompts)
    return Canary(prompts=rows, logprobs=tuple(logprobs), max_abs=bounds[0], mean_abs=bounds[1])


def write(base_folder: Path, out: Path, mode: str, seed: int, step: int, gpu: bool = False) -> str:
    """Write one checkpoint folder; returns the sha256 of its manifest."""
    out.mkdir(parents=True)
    base = BaseWeights(base_folder)
    if mode == "full":
        served = merged = every_weight(base, seed)
        save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    else:
        lora = adapter(base, seed)
        write_adapter(base_folder, out, lora)
        merged = dict(merged_tensors(base, lora, ALPHA / RANK, torch.bfloat16 if gpu else torch.float32))
        served = merged if mode == "merged" else lora
    table = WeightTable(
        mode="lora" if mode == "lora" else "merged",
        tensors=tuple(entry(name, tensor, gpu and mode == "merged") for name, tensor in served.items()),
    )
    (out / "weights.json").write_bytes(to_json(table))
    files = tuple(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(out.iterdir())
    )
    manifest = CheckpointManifest(
        run="toy", step=step, epoch=step, lineage=0, parent="", batch="", base_digest="", spec_digest="",
        instance="test", job=1, fence=1, files=files, canary=canary(base_folder, merged, BF16 if gpu else FP32),
        parameters="full" if mode == "full" else "lora",
    )  # fmt: skip
    raw = to_json(manifest)
    (out / "manifest.json").write_bytes(raw)
    return hashlib.sha256(raw).hexdigest()


def write_adapter(base: Path, out: Path, lora: dict[str, Tensor]) -> None:
    save_file(lora, out / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
                "bias": "none", "target_modules": list(TARGETS), "base_model_name_or_path": str(base)}  # fmt: skip
    (out / "adapter_config.json").write_text(json.dumps(settings))


def main() -> None:
    base, *wanted = sys.argv[1:]
    for item in wanted:
        out, mode, seed, step, *gpu = item.split(":")
        print(write(Path(base), Path(out), mode, int(seed), int(step), bool(gpu)))


if __name__ == "__main__":
    main()

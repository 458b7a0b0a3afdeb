"""Makes committed checkpoint folders for a toy: `MEGATRON_PYTHON make_checkpoint.py BASE
OUT:merged|lora|experts|full:SEED:STEP[:gpu|bf16] ...`.

It replaces the trainer in the engine's tests: a random adapter (`experts`: on experts alone) or, with `full`, noise on every
weight; a weight table; and a canary scored with Hugging Face in fp32. bf16: served in bf16, with a canary whose bounds allow
it. gpu: the same, and merged weights known by sum64. It prints each manifest's sha256. Environment: PYTHONPATH with workers/
and schema/.
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
from msgspec.structs import replace
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from artd_schema.codec import to_json
from artd_schema.data.manifest import Canary, CheckpointManifest, FileEntry, WeightEntry, WeightTable
from artd_workers.models.codec import PEFT_PREFIX
from artd_workers.trainer.checkpoint import held
from artd_workers.transfer.checksum import sum_of
from artd_workers.transfer.merge import BaseWeights, merged_tensors

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 4, 8
FP32, BF16, FP32_ROUNDING = (1e-5, 2e-6), (4.0, 0.15), 1e-6
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


def prompts(base: Path) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    vocab = json.loads((base / "config.json").read_text())["vocab_size"]
    return [torch.randint(3, vocab, (n,), generator=generator) for n in (24, 17, 32)]


@torch.no_grad()
def logprobs(model: Any, asked: list[Tensor]) -> tuple[tuple[float, ...], ...]:
    """Of tokens 1.. of each prompt."""
    found = []
    for ids in asked:
        scores = torch.log_softmax(model(ids[None]).logits[0].double(), -1)
        found.append(tuple(scores[:-1].gather(1, ids[1:, None])[:, 0].tolist()))
    return tuple(found)


def canary(base: Path, merged: dict[str, Tensor], bf16: bool, below: dict[str, Tensor] | None = None) -> Canary:
    """Logprobs of Hugging Face with the merged weights. below: the base's, for an engine that is served the adapter alone."""
    model, asked = hugging_face(base, merged), prompts(base)
    largest, mean = BF16 if bf16 else FP32
    found = logprobs(model, asked)
    made = Canary(prompts=tuple(tuple(ids.tolist()) for ids in asked), logprobs=found, max_abs=largest, mean_abs=mean)
    if below is None:
        return made
    rounding = FP32_ROUNDING
    if bf16:
        flat = [
            torch.tensor([one for row in rows for one in row]) for rows in (found, logprobs(model.bfloat16(), asked))
        ]
        rounding = float((flat[0] - flat[1]).square().mean().sqrt())
    return replace(made, base=logprobs(hugging_face(base, below), asked), rounding=rounding)


def write(base_folder: Path, out: Path, mode: str, seed: int, step: int, kind: str = "") -> str:
    """Write one checkpoint folder; returns the sha256 of its manifest."""
    out.mkdir(parents=True)
    base, gpu, bf16 = BaseWeights(base_folder), kind == "gpu", bool(kind)
    below, rows = None, ()
    if mode == "full":
        served = merged = every_weight(base, seed)
        save_file(merged, out / "model.safetensors", metadata={"format": "pt"})
    else:
        lora = {name: one for name, one in adapter(base, seed).items() if mode != "experts" or ".experts." in name}
        mode = "merged" if mode == "merged" else "lora"
        write_adapter(base_folder, out, lora)
        dtype = torch.bfloat16 if bf16 else torch.float32
        merged = dict(merged_tensors(base, lora, ALPHA / RANK, dtype if mode == "merged" else torch.float32))
        served = merged if mode == "merged" else lora
        if mode == "lora":
            below, rows = dict(merged_tensors(base, {}, 1.0, torch.float32)), held.entries(lora, ALPHA / RANK, dtype)
    table = WeightTable(
        mode="lora" if mode == "lora" else "merged",
        tensors=tuple(entry(name, tensor, gpu and mode == "merged") for name, tensor in served.items()),
        held=rows,
    )
    (out / "weights.json").write_bytes(to_json(table))
    files = tuple(
        FileEntry(path.name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(out.iterdir())
    )
    manifest = CheckpointManifest(
        run="toy", step=step, epoch=step, lineage=0, parent="", batch="", base_digest="", spec_digest="",
        instance="test", job=1, fence=1, files=files, canary=canary(base_folder, merged, bf16, below),
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
        out, mode, seed, step, *kind = item.split(":")
        print(write(Path(base), Path(out), mode, int(seed), int(step), *kind))


if __name__ == "__main__":
    main()

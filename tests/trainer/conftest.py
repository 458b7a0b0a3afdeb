"""Trainer tests: they need the megatron runtime's interpreter and the test overlay, which `make test` uses."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

os.environ["TORCH_COMPILE_DISABLE"] = "1"
# Read when triton is first imported: the GPU's kernels run in its interpreter here.
os.environ["TRITON_INTERPRET"] = "1"
os.environ["GLOO_SOCKET_IFNAME"] = "lo"

if importlib.util.find_spec("megatron") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    import torch

    from tests import toys

    torch.set_num_threads(1)

DENSE = ("llama", "qwen3", "tied")
SPARSE = ("moe", "mixed")


@pytest.fixture(scope="session")
def toy_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> checkpoint folder; `tied` is a Llama with tied embeddings, `mixed` a mixture of experts with a dense layer,
    tied embeddings and expert weights that do not add up to 1."""
    root = tmp_path_factory.mktemp("toys")
    return {
        "llama": toys.make(root / "llama", "llama", seed=1),
        "qwen3": toys.make(root / "qwen3", "qwen3", seed=2),
        "tied": toys.make(root / "tied", "llama", seed=3, tied=True),
        "moe": toys.make(root / "moe", "qwen3_moe", seed=4),
        "mixed": toys.make(root / "mixed", "qwen3_moe", 5, True, mlp_only_layers=[1], norm_topk_prob=False),
    }


@pytest.fixture(params=DENSE + SPARSE)
def folder(request: pytest.FixtureRequest, toy_folders: dict[str, Path]) -> Path:
    """Each toy."""
    return toy_folders[request.param]


@pytest.fixture(params=DENSE)
def dense_folder(request: pytest.FixtureRequest, toy_folders: dict[str, Path]) -> Path:
    return toy_folders[request.param]


@pytest.fixture(params=SPARSE)
def sparse_folder(request: pytest.FixtureRequest, toy_folders: dict[str, Path]) -> Path:
    return toy_folders[request.param]

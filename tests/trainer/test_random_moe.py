"""The random mixture of experts of `make demo-moe`: reproducible, complete, loadable, made once and durable."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from artd_workers.models import folder, random_moe
from artd_workers.models.registry import plan_for, read_config

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_moe.make(tmp_path_factory.mktemp("models") / "moe", seed=3)


def test_the_same_seed_gives_the_same_bytes(made: Path, tmp_path: Path) -> None:
    again, other = random_moe.make(tmp_path / "again", seed=3), random_moe.make(tmp_path / "other", seed=4)
    for path in made.iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes()
        assert path.name != "model.safetensors" or (other / path.name).read_bytes() != path.read_bytes()


def test_every_matrix_has_the_deviation_that_makes_routes_flip(made: Path) -> None:
    for name, tensor in load_file(made / "model.safetensors").items():
        if tensor.ndim == 1:
            assert bool((tensor == 1).all()), name
        else:
            assert float(tensor.std()) == pytest.approx(random_moe.STD, rel=0.1), name


def test_hugging_face_finds_every_weight_and_the_words(made: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, told = AutoModelForCausalLM.from_pretrained(made, output_loading_info=True)
    assert not told["missing_keys"] and not told["unexpected_keys"] and not told["mismatched_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == 953_088 and model.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(made)
    assert tokenizer("w5 w200 what")["input_ids"] == [5, 200, 0] and tokenizer.decode([255, 7]) == "w255 w7"
    assert tokenizer.eos_token_id is None, "nothing but its length ends a sequence"


def test_the_trainer_takes_it(made: Path) -> None:
    plan = plan_for(read_config(made))
    assert plan.routes is not None
    assert (plan.routes.layers, plan.routes.topk, plan.routes.experts) == (2, 2, 8)


def test_it_is_made_once(made: Path) -> None:
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert random_moe.make(made, seed=9) == made and (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert [path.name for path in made.parent.iterdir()] == [made.name], "temporary files stay behind"


def test_a_folder_that_failed_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), folder.create_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("half")
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


def test_the_second_of_two_makers_takes_what_the_first_made(tmp_path: Path) -> None:
    with folder.create_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("second")
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "file").write_text("first")
    assert (tmp_path / "out" / "file").read_text() == "first"
    assert os.listdir(tmp_path) == ["out"]


def test_all_is_on_disk_before_the_name_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = folder._sync
    monkeypatch.setattr(folder, "_sync", lambda path: (synced.append(path.name), sync(path)))
    with folder.create_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("text")
        name = partial.name
    assert synced == ["file", name, tmp_path.name]

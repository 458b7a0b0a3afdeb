"""base_model: what is refused, and what counts as the same model."""

from __future__ import annotations

import errno
import json
import os
import shutil

import pytest

from artd.errors import Conflict, Invalid
from artd.models import base_model
from artd.models.base_model import check_family, check_pinned, pin
from artd.supervise.packages import NO_PACKAGES
from artd_schema.data.trajectory import RouteShape

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 99}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


def refused(folder, text):
    with pytest.raises(Invalid, match=text) as caught:
        pin(str(folder))
    assert caught.value.field == "spec.model"


def test_a_model_is_pinned_by_every_file(model):
    (model / ".hidden").write_text("x")
    found = pin(str(model))
    assert found.vocab_size == 99 and [f.name for f in found.files] == ["config.json", "model.safetensors"]
    assert pin(str(model)).digest == found.digest
    (model / "model.safetensors").write_bytes(b"Weights")
    assert pin(str(model)).digest != found.digest


def test_a_missing_folder(tmp_path):
    refused(tmp_path / "nowhere", "there is no model folder")


def test_a_relative_path(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    refused("model", "neither the absolute path")


def test_a_file_in_place_of_a_folder(model):
    refused(model / "config.json", "there is no model folder")


def test_weights_both_stored_and_drawn(model):
    (model / "seeded.json").write_text("{}")
    refused(model, r"holds both \*.safetensors and seeded.json .* remove the one")


def test_no_config(model):
    (model / "config.json").unlink()
    refused(model, "config.json cannot be read")


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"architectures": "LlamaForCausalLM", "vocab_size": 1}'])
def test_a_config_that_is_none(model, text):
    (model / "config.json").write_text(text)
    refused(model, "config.json|architecture")


@pytest.mark.parametrize("vocab", [None, "many", 0, -3, True])
def test_a_vocabulary_that_is_none(model, vocab):
    (model / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": vocab}))
    refused(model, "vocab_size")


def test_no_vocabulary(model):
    (model / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    refused(model, "vocab_size")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0 of 8 experts"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9 of 8 experts"),
        ({"num_experts": 1 << 17}, "num_experts_per_tok = 2 of 131072 experts"),
    ],
)
def test_experts_that_no_router_could_choose(model, changes, text):
    good = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_hidden_layers": 3, "num_experts": 8}
    good |= {"num_experts_per_tok": 2, "decoder_sparse_step": 2}
    (model / "config.json").write_text(json.dumps(good))
    assert pin(str(model)).routes == RouteShape(layers=1, topk=2, experts=8)
    (model / "config.json").write_text(json.dumps(good | changes))
    refused(model, text)


def test_not_safetensors(model):
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    refused(model, "no \\*.safetensors; convert")


def test_an_unknown_architecture_lists_the_known_ones(model):
    (model / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["BertModel"]}))
    with pytest.raises(Invalid, match="architecture BertModel: .* Known: LlamaForCausalLM, Qwen3ForCausalLM") as caught:
        check_family(str(model), pin(str(model)).architecture, NO_PACKAGES.families)
    assert caught.value.field == "spec.model"


def test_the_same_files_pass_and_a_touch_is_looked_at_again(model):
    pinned = pin(str(model))
    check_pinned(str(model), pinned)
    os.utime(model / "model.safetensors", ns=(1, 1))
    check_pinned(str(model), pinned)


def test_a_changed_or_lost_file_is_a_conflict(model):
    pinned = pin(str(model))
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(Conflict, match="model.safetensors changed since the run was created"):
        check_pinned(str(model), pinned)
    (model / "model.safetensors").unlink()
    with pytest.raises(Conflict, match="lost model.safetensors"):
        check_pinned(str(model), pinned)


def test_what_cannot_be_read_is_told_and_ends_nobody(model, monkeypatch):
    """An OSError of a service would end the daemon, at every start again."""
    pinned = pin(str(model))
    shutil.rmtree(model)
    model.write_text("a file now")
    with pytest.raises(Conflict, match=r"config\.json cannot be read \(Not a directory\): make it readable"):
        check_pinned(str(model), pinned)


def test_an_unreadable_file_of_a_new_model_is_named(model, monkeypatch):
    def closed(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(base_model, "_entry", closed)
    refused(model, "config.json cannot be read: Permission denied")


def test_weights_may_be_drawn(model):
    (model / "model.safetensors").rename(model / "seeded.json")
    first = pin(str(model))
    (model / "seeded.json").write_bytes(b"another seed")
    assert pin(str(model)).digest != first.digest

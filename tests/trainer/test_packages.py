"""Code of packages, as the trainer imports it: from an intact copy, or not a line of it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from artd_schema.packages import PackageCode, digest_files
from artd_workers.models import registry
from artd_workers.models.base import UnsupportedModel
from artd_workers.packages import PackageError, load

TRIPWIRE = b"raise SystemExit('it ran')\n"
FAMILY = b"""
from artd_workers.models.base import attention, decoder_plan, dense_layers

def plan(config):
    return decoder_plan("toy", config, dense_layers(config, attention(qk_norm=False)))

def fail(config):
    return config["no such field"]

def wrong(config):
    return {}
"""
CONFIG = {
    "architectures": ["ToyForCausalLM"], "vocab_size": 50, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
    "intermediate_size": 16, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a one-file package to a folder of its digest on the path; returns its code."""

    def write(name: str, text: bytes, function: str = "plan") -> PackageCode:
        code = PackageCode(
            kind="ToyForCausalLM", target=f"{name}:{function}", distribution="d", version="1",
            digest=digest_files({f"{name}.py": text}),
        )  # fmt: skip
        folder = tmp_path / code.digest
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.py").write_bytes(text)
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return code

    return write


def test_code_that_is_not_the_copy_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tripwire.py").write_bytes(TRIPWIRE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(PackageError, match="would be imported from .*tripwire.py, not from the copy 000000000000"):
        load(PackageCode(kind="x", target="tripwire:x", distribution="d", version="1", digest="0" * 12))


def test_a_damaged_copy_does_not_run(copied, tmp_path: Path) -> None:
    code = copied("tripwire", b"x = print\n", "x")
    (tmp_path / code.digest / "tripwire.py").write_bytes(TRIPWIRE)
    with pytest.raises(PackageError, match="is damaged: its files have the digest .*; start artd again"):
        load(code)


def test_what_cannot_be_imported_is_told(copied) -> None:
    with pytest.raises(PackageError, match="its copy 000000000000 is not on the path"):
        load(PackageCode(kind="x", target="no_such_module:x", distribution="d", version="1", digest="0" * 12))
    with pytest.raises(PackageError, match="cannot be imported: ZeroDivisionError"):
        load(copied("broken", b"1 / 0\n"))
    with pytest.raises(PackageError, match="cannot be imported: TypeError: plan is not a function"):
        load(copied("constant", b"plan = 3\n"))


def test_a_family_of_a_package_plans_its_models(copied, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_ADOPTED", {})
    with pytest.raises(
        UnsupportedModel, match="ToyForCausalLM is not supported; artd trains .*Llama.*, and what an installed"
    ):
        registry.plan_for(CONFIG)
    registry.adopt(copied("toy_family", FAMILY))
    assert registry.plan_for(CONFIG).family == "toy"
    registry.adopt(copied("toy_family", FAMILY, "fail"))
    with pytest.raises(UnsupportedModel, match="failed: KeyError: 'no such field'"):
        registry.plan_for(CONFIG)
    registry.adopt(copied("toy_family", FAMILY, "wrong"))
    with pytest.raises(UnsupportedModel, match="returned a dict, not a Plan"):
        registry.plan_for(CONFIG)

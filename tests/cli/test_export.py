"""`artctl export`: verified copies of committed adapters, whole models in the trainer's interpreter.

Damage and wrong names are told, and nothing half-made stays.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from artd.cli import ctl
from tests.cli.conftest import Call
from tests.cli.rows import ADAPTER, Made


@pytest.mark.parametrize("name", ["toy", "toy@2"])
def test_peft(name: str, made: Made, artctl: Call, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert artctl("export", name, str(out)) == (0, f"{out}\n", "")
    assert sorted(path.name for path in out.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert (out / "adapter_model.safetensors").read_bytes() == ADAPTER["adapter_model.safetensors"]


@pytest.fixture
def with_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints made from now on have adapters of experts."""
    header = json.dumps({"base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight": {}}).encode()
    monkeypatch.setitem(ADAPTER, "adapter_model.safetensors", len(header).to_bytes(8, "little") + header)


@pytest.mark.usefixtures("with_experts")
def test_an_adapter_of_experts_says_what_peft_it_needs(made: Made, artctl: Call, tmp_path: Path) -> None:
    code, out, err = artctl("export", "toy", str(tmp_path / "out"))
    assert (code, out) == (0, f"{tmp_path / 'out'}\n")
    assert "peft 0.21 with transformers 5" in err and "--format merged" in err


@pytest.mark.parametrize(
    ("name", "code", "says"),
    [
        ("toi", 5, "did you mean toy?"),
        ("toy@9", 5, "there is no checkpoint toy@9; kept are @2"),
        ("toy@0", 5, "the files of toy@0 are deleted (keep_checkpoints); kept are @2"),
        ("old", 5, "there is no checkpoint old; the run has none yet"),
        ("toy@x", 2, "'toy@x' is not RUN or RUN@STEP"),
    ],
)
def test_names(name: str, code: int, says: str, made: Made, artctl: Call, tmp_path: Path) -> None:
    found, _, err = artctl("export", name, str(tmp_path / "out"))
    assert found == code and says in err
    assert not (tmp_path / "out").exists()


def test_an_existing_folder_is_not_touched(made: Made, artctl: Call, tmp_path: Path) -> None:
    code, _, err = artctl("export", "toy", str(tmp_path))
    assert code == 6 and "exists already" in err


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "manifest.json"])
@pytest.mark.parametrize("damage", ["changed", "missing"])
def test_damage(name: str, damage: str, made: Made, artctl: Call, tmp_path: Path) -> None:
    [folder] = (made.data / "checkpoints/toy").glob("*s000002*")
    if damage == "changed":
        (folder / name).write_bytes((folder / name).read_bytes() + b" ")
    else:
        (folder / name).unlink()
    code, _, err = artctl("export", "toy", str(tmp_path / "new" / "out"))
    assert code == 1 and name in err
    assert not list((tmp_path / "new").glob("*"))


def test_merged_without_a_runtime_says_what_to_install(made: Made, artctl: Call, tmp_path: Path) -> None:
    code, _, err = artctl("export", "toy", str(tmp_path / "new" / "out"), "--format", "merged")
    assert code == 1 and "artd runtime install megatron --cpu" in err
    assert not list((tmp_path / "new").glob("*"))


# ---- a run that trains every weight ---------------------------------------------------------------------------------


@pytest.fixture
def full(made: Made) -> Path:
    """toy@2 as such a run leaves it; its folder."""
    [folder] = (made.data / "checkpoints/toy").glob("*s000002*")
    for path in folder.iterdir():
        path.unlink()
    files = {"model.safetensors": b"weights" * 400_000, "weights.json": b"{}", "optimizer.safetensors": b"moments"}
    for name, content in files.items():
        (folder / name).write_bytes(content)
    entries = [{"name": name, "sha256": hashlib.sha256(content).hexdigest()} for name, content in files.items()]
    raw = json.dumps({"files": entries, "parameters": "full"}).encode()
    (folder / "manifest.json").write_bytes(raw)
    made.connection.execute("UPDATE checkpoint SET sha = ? WHERE step = 2", (hashlib.sha256(raw).hexdigest(),))
    return folder


@pytest.mark.parametrize("options", [(), ("--format", "merged")])
def test_every_weight(
    options: tuple[str, ...], full: Path, artctl: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's program gets the weights and their table, checked, and makes the folder."""

    def call(_data: Path, _config: str | None, module: str, arguments: list[str], _what: str) -> None:
        assert module == "artd_workers.trainer.tools.export"
        given = dict(zip(arguments[::2], arguments[1::2], strict=True))
        assert (given["--base"], given["--dtype"]) == ("/models/toy", "float32")
        checkpoint, out = Path(given["--checkpoint"]), Path(given["--out"])
        assert sorted(path.name for path in checkpoint.iterdir()) == ["model.safetensors", "weights.json"]
        out.mkdir()
        (checkpoint / "model.safetensors").rename(out / "model.safetensors")

    monkeypatch.setattr("artd.cli.in_trainer.call", call)
    out = tmp_path / "new" / "out"
    out.parent.mkdir()
    assert artctl("export", "toy", str(out), *options) == (0, f"{out}\n", "")
    assert (out / "model.safetensors").read_bytes() == (full / "model.safetensors").read_bytes()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_there_is_no_adapter_of_every_weight(full: Path, artctl: Call, tmp_path: Path) -> None:
    code, _, err = artctl("export", "toy", str(tmp_path / "new" / "out"), "--format", "peft")
    assert code == 6 and "toy@2 has no adapter" in err
    assert not list((tmp_path / "new").glob("*"))


def test_damaged_weights(full: Path, artctl: Call, tmp_path: Path) -> None:
    with (full / "model.safetensors").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"?")
    code, _, err = artctl("export", "toy", str(tmp_path / "new" / "out"))
    assert code == 1 and "model.safetensors is damaged" in err
    assert not list((tmp_path / "new").glob("*"))


def test_a_relative_folder(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ctl.main(["export", "toy", "here", "--data-dir", str(made.data)]) == 0
    assert (tmp_path / "here/adapter_config.json").is_file()

"""`artctl export`: verified copies of committed adapters; damage and wrong names are told, and nothing half-made stays."""

from __future__ import annotations

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


def test_a_relative_folder(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ctl.main(["export", "toy", "here", "--data-dir", str(made.data)]) == 0
    assert (tmp_path / "here/adapter_config.json").is_file()

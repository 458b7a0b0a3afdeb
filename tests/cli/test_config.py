"""Settings: flag > environment > file > default; what is wrong is named with file and key."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec
import pytest

from artd.cli import main
from artd.config import ConfigError, Settings, load
from artd_schema import paths


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "artd.toml"
    path.write_text('data_dir = "from-file"\nlog_level = "warning"\ndrain_s = 5.0\n[gateway]\nport = 8123\n')
    return path


def test_defaults(tmp_path: Path) -> None:
    settings = load(env={})
    assert settings.data_dir == str(paths.default_data_dir()) == str(tmp_path / "share/artd/data")
    assert (settings.log_level, settings.drain_s, settings.gateway.host, settings.gateway.port) == (
        "info",
        60.0,
        "127.0.0.1",
        0,
    )
    assert settings.limits.max_message_mib == 64 and settings.runtimes.engine.python == ""
    days = settings.retention
    assert (days.trajectories_days, days.batches_days, days.exchanges_days) == (30.0, 30.0, 7.0)


def test_precedence(toml: Path) -> None:
    env = {"ARTD_CONFIG": str(toml)}
    assert load(env={}).data_dir != load(env=env).data_dir == str(toml.parent / "from-file")
    assert load(str(toml), env={}).gateway.port == 8123
    env |= {"ARTD_DATA_DIR": "/from/env", "ARTD_LOG": "ERROR"}
    assert load(env=env).data_dir == "/from/env" and load(env=env).log_level == "error"
    flagged = load(None, "/from/flag", "debug", env=env)
    assert (flagged.data_dir, flagged.log_level, flagged.drain_s) == ("/from/flag", "debug", 5.0)


def test_the_config_flag_beats_the_environment(toml: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.toml"
    other.write_text("drain_s = 1.0\n")
    assert load(str(other), env={"ARTD_CONFIG": str(toml)}).drain_s == 1.0


def test_the_users_standard_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "xdg/artd/artd.toml"
    path.parent.mkdir(parents=True)
    path.write_text("drain_s = 2.0\n")
    assert load(env={"XDG_CONFIG_HOME": str(tmp_path / "xdg")}).drain_s == 2.0


def test_paths_of_a_file_are_relative_to_it(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text('[runtimes.engine]\npython = "venv/bin/python"\npythonpath = ["x", "/y"]\n')
    engine = load(str(path), env={}).runtimes.engine
    assert (engine.python, engine.pythonpath) == (str(tmp_path / "venv/bin/python"), (str(tmp_path / "x"), "/y"))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "dran_s = 1\n",
            "unknown key dran_s (did you mean drain_s?); the file has data_dir, log_level, drain_s, gateway,",
        ),
        (
            "[gateway]\nprot = 1\n",
            "unknown key gateway.prot (did you mean port?); gateway has host, port, beyond_loopback",
        ),
        (
            "[runtimes.engine]\npyton = 'x'\n",
            "unknown key runtimes.engine.pyton (did you mean python?); runtimes.engine has python, pythonpath",
        ),
        ("[gateway]\nport = 70000\n", "gateway.port: Expected `int` <= 65535"),
        ("[limits]\nmax_message_mib = 'x'\n", "limits.max_message_mib: Expected `int`, got `str`"),
        ("[limits]\nreserve_mib = -1\n", "limits.reserve_mib: Expected `int` >= 0"),
        ("[limits]\nstall_s = -1\n", "limits.stall_s: Expected `float` >= 0"),
        (
            "[retention]\ntrajectory_days = 1\n",
            "unknown key retention.trajectory_days (did you mean trajectories_days?)",
        ),
        ("[retention]\nbatches_days = -1\n", "retention.batches_days: Expected `float` >= 0"),
        ("gateway = 3\n", "gateway: Expected `object`, got `int`"),
        ("log_level = 'loud'\n", "log_level: Invalid enum value 'loud'"),
        ("x = = 1\n", "cannot be read: Invalid value (at line 1"),
    ],
)
def test_errors_name_file_and_key(text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "artd.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(str(path), env={})
    assert str(path) in str(raised.value) and says in str(raised.value)
    assert main.main(["start", "--config", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_gpus(tmp_path: Path) -> None:
    path = tmp_path / "artd.toml"
    path.write_text("[gpus]\ntrainer = [0]\nengine = [1, 2]\n")
    settings = load(str(path), env={})
    assert (settings.gpus.trainer, settings.gpus.engine) == ((0,), (1, 2))
    path.write_text("[gpus]\nengine = [-1]\n")
    with pytest.raises(ConfigError, match="gpus.engine"):
        load(str(path), env={})


def test_other_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ARTD_LOG: invalid log level 'loud'"):
        load(env={"ARTD_LOG": "loud"})
    with pytest.raises(ConfigError, match="there is no configuration file"):
        load(str(tmp_path / "none.toml"), env={})


def test_every_setting_is_in_the_documentation() -> None:
    text = (Path(__file__).parents[2] / "docs/config.md").read_text()
    for name in _dotted(Settings):
        assert f"`{name}`" in text or name.startswith("runtimes.engine"), name


def _dotted(kind: type[msgspec.Struct], prefix: str = "") -> list[str]:
    names = []
    for field in msgspec.structs.fields(kind):
        nested = isinstance(field.type, type) and issubclass(field.type, msgspec.Struct)
        names += _dotted(field.type, f"{prefix}{field.name}.") if nested else [prefix + field.name]
    return names


PROBE = """
import json, os, sys
seen = [sys.argv[3], os.environ["PYTHONPATH"].split(":")[-1], os.environ["CUDA_VISIBLE_DEVICES"]]
print(json.dumps({"python": "3.12.1", "versions": {"torch": " ".join(seen)}, "failed": {}, "gpus": 1, "cuda": "13.0", "refused": ""}))
"""


@pytest.mark.parametrize("before", [True, False], ids=["before the verb", "after it"])
def test_the_doctor_looks_where_it_is_told_to(tmp_path: Path, capsys, before: bool) -> None:
    """The data folder, and interpreters of one's own, with their folders and GPUs: with those, no runtime is missing."""
    path, data, mine = tmp_path / "artd.toml", tmp_path / "data", tmp_path / "python"
    mine.write_text(f"#!{sys.executable}\n{PROBE}")
    mine.chmod(0o755)
    path.write_text(
        f'[runtimes.trainer]\npython = "python"\npythonpath = ["/a/b"]\n[runtimes.engine]\npython = "{tmp_path}/no"\n'
        "[gpus]\ntrainer = [3]\n"
    )
    options = ["--config", str(path), "--data-dir", str(data)]
    words = [*options, "doctor"] if before else ["doctor", *options]
    assert main.main([*words, "--json"]) == 1
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert str(data) in found["file system"]["value"]
    assert (found["megatron"]["state"], found["vllm"]["state"]) == ("ok", "missing")
    assert "torch trainer /a/b 3" in found["megatron"]["value"]
    assert "artd.toml" in found["vllm"]["next"]
    assert [name for name, each in found.items() if each["state"] == "missing"] == ["vllm"]

"""The JSON documents of docs/cli-json.md, byte for byte. `ARTD_GOLDEN=write pytest tests/cli/test_golden.py` renews them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.conftest import Call, FakeDaemon
from tests.cli.rows import Made

GOLDEN = Path(__file__).parent / "golden"
WHILE_DOWN = {
    "runs": ("runs",),
    "jobs": ("jobs",),
    "trajectories": ("trajectories",),
    "groups": ("groups",),
    "rollouts": ("rollouts",),
    "batches": ("batches",),
    "checkpoints": ("checkpoints",),
    "metrics": ("metrics",),
    "diff": ("diff", "@2", "@2"),
    "workers": ("workers",),
    "pushes": ("pushes",),
    "job": ("job", "4"),
    "samples": ("samples",),
    "show": ("show", "1", "--tokens"),
    "events": ("events",),
    "status-down": ("status",),
}


def check(name: str, text: str, data: Path, pid: int = 0) -> None:
    text = text.replace(str(data), "DATA").replace(f'"pid": {pid},', '"pid": 4121,')
    path = GOLDEN / f"{name}.json"
    if os.environ.get("ARTD_GOLDEN") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert json.loads(text) == json.loads(path.read_text())
    assert text == path.read_text()


@pytest.mark.parametrize("name", WHILE_DOWN)
def test_read_verbs_with_the_daemon_down(name: str, made: Made, artctl: Call) -> None:
    code, out, err = artctl(*WHILE_DOWN[name], "--json")
    assert (code, err) == (3 if name == "status-down" else 0, "")
    check(name, out, made.data)


def test_status_with_the_daemon_up(made: Made, daemon: FakeDaemon, artctl: Call) -> None:
    code, out, _ = artctl("status", "--json")
    assert code == 0
    check("status-up", out, made.data, os.getpid())


def test_every_time_has_its_iso_text(made: Made, artctl: Call) -> None:
    for words in WHILE_DOWN.values():
        _, out, _ = artctl(*words, "--json")
        _walk(json.loads(out))


def _walk(value: object) -> None:
    if isinstance(value, list):
        for entry in value:
            _walk(entry)
    if isinstance(value, dict):
        for key, inner in value.items():
            _walk(inner)
            if key in ("at", "created", "touched", "started", "ended", "since"):
                iso = value[f"{key}_iso"]
                assert (iso is None) == (inner is None) and (iso is None or iso.endswith("Z")), (key, inner, iso)


def test_documents_name_their_schema(made: Made, artctl: Call) -> None:
    for name, words in WHILE_DOWN.items():
        _, out, _ = artctl(*words, "--json")
        assert json.loads(out)["schema"] == f"artctl.{name.partition('-')[0]}/1"

"""A GPU that is not there, or cannot be used, is found out from the driver alone, and said so that somebody can act."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from artd.cli.status.problems import _spec_errors
from artd_schema.run.spec import RunSpec, TrainerSpec
from artd_schema.wire.worker import Welcome
from artd_schema.wire.worker_config import TrainerConfig
from artd_workers import gpus
from artd_workers.trainer import __main__ as trainer
from tests.compiled import library
from tests.fakes import driver

NONE = "cuInit says no CUDA-capable device is detected (100)"


@pytest.fixture
def meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have the driver that is found be the one that is told."""

    def met(**told: Any) -> None:
        for name, value in driver.environment(tmp_path, **told).items():
            monkeypatch.setenv(name, value)

    return met


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({}, ""),
        ({"gpus": 2, "visible": "1"}, ""),
        ({"gpus": 2, "visible": "1,5"}, ""),
        ({"gpus": 0}, NONE),
        ({"visible": ""}, NONE),
        ({"visible": "-1"}, NONE),
        ({"visible": "1"}, NONE),
        ({"gpus": 0, "init": 0}, "NVIDIA's driver shows none"),
        ({"init": 34}, "cuInit says CUDA driver is a stub library (34)"),
        ({"init": 802}, ""),  # not yet
        ({"init": 999}, "cuInit says an error without a name (999)"),
        ({"init": driver.CRASHES}, "asking NVIDIA's driver ended with status -6"),
    ],
)
def test_the_driver_is_asked(told: dict[str, Any], why: str, meet: Callable[..., None]) -> None:
    meet(**told)
    assert gpus.obstacle() == why


def test_a_driver_that_hangs_is_not_waited_for(meet: Callable[..., None]) -> None:
    meet(init=driver.HANGS)
    assert gpus.obstacle(timeout_s=0.5) == "NVIDIA's driver did not answer within 0.5 s, see dmesg"


def test_a_machine_without_a_driver() -> None:
    def load(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file: No such file or directory")

    assert gpus.look(load) == (
        "NVIDIA's driver cannot be loaded, libcuda.so.1: cannot open shared object file: No such file or directory"
    )


def test_a_driver_that_fails_later(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ctypes.CDLL(str(library(driver.SOURCE)))
    refuses = SimpleNamespace(
        cuInit=lambda flags: 0, cuDeviceGetCount=lambda count: 34, cuGetErrorString=fake.cuGetErrorString
    )
    assert gpus.look(lambda name: refuses) == "cuDeviceGetCount says CUDA driver is a stub library (34)"


def test_what_is_said_names_field_machine_cause_and_way_out(meet: Callable[..., None]) -> None:
    meet(visible="7")
    said = gpus.refusal("engine.device", "cuda")
    assert said == (
        f"engine.device is cuda, and no GPU can be used on {os.uname().nodename}: {NONE} (CUDA_VISIBLE_DEVICES is '7'); start artd "
        "where one can, or a run with another engine.device (auto, cpu)"
    )
    assert _spec_errors().search(said), "artctl status knows that another start ends alike"
    assert gpus.refusal("engine.device", "auto") == gpus.refusal("engine.device", "cpu") == ""


@pytest.mark.parametrize(("version", "refused"), [("2.13.0+cpu", True), ("2.11.0+cu130", False), ("", False)])
def test_a_torch_that_sees_no_gpu_anywhere(
    version: str, refused: bool, meet: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def installed(name: str) -> str:
        if name != "torch" or not version:
            raise metadata.PackageNotFoundError(name)
        return version

    meet()
    monkeypatch.setattr(metadata, "version", installed)
    said = gpus.refusal("trainer.device", "cuda")
    assert bool(said) == refused
    assert not said or f"torch 2.13.0+cpu of {sys.executable} is built without CUDA" in said


class FakeLink:
    """A daemon that wants a GPU."""

    closed = False

    def start(self) -> Welcome:
        config = TrainerConfig(run="r", spec=RunSpec(model="/m", trainer=TrainerSpec(device="cuda")), base_digest="0")
        return Welcome(worker="trainer", heartbeat_s=1.0, max_message=1, trainer=config)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    made = FakeLink()
    monkeypatch.setattr(trainer, "versions", dict)
    monkeypatch.setattr(trainer.Link, "from_env", lambda *_: made)
    return made


def test_a_trainer_ends_before_it_imports_torch(
    link: FakeLink, meet: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    meet(gpus=0)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert trainer.main() == 1 and link.closed
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trainer worker: trainer.device is cuda, and no GPU can be used on ") and NONE in line


def test_what_torch_finds_out_later_ends_it_in_one_line_too(
    link: FakeLink, meet: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(spec: RunSpec) -> None:
        raise ValueError("trainer.device is cuda, and torch sees no GPU here")

    meet()
    monkeypatch.setattr(gpus, "_build", str)
    found = SimpleNamespace(prepare=prepare, device_of=None)
    monkeypatch.setitem(sys.modules, "artd_workers.trainer.placement", found)
    assert trainer.main() == 1 and link.closed
    assert capsys.readouterr().err == "trainer worker: trainer.device is cuda, and torch sees no GPU here\n"

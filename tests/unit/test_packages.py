"""What packages bring, as the daemon sees it: found by metadata, copied by digest, never imported."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import msgspec
import pytest

from artd.cli.outcome import FAILED, NOT_FOUND, CliError
from artd.cli.package_code import copy_code
from artd.datadir.layout import DataDir
from artd.errors import Invalid
from artd.models.base_model import check_family
from artd.retention.code_copies import delete_copies
from artd.runs.lifecycle import Runs
from artd.supervise.packages import LOSS, NO_PACKAGES, Offers, Packages, install_packages, installed_files
from artd_schema.codec import to_json
from artd_schema.data.manifest import CheckpointManifest
from artd_schema.packages import RunCode, digest_files, read_tree
from artd_schema.run.spec import LossSpec, RunSpec, first_difference
from artd_schema.wire import client_api as api
from tests.fakes.rows import EVERY_STEP, count, open_store

MANIFEST = {
    "version": 1, "run": "r", "step": 0, "epoch": 0, "lineage": 0, "parent": "", "batch": "", "base_digest": "", "spec_digest": "",
    "instance": "", "job": 1, "fence": 1, "files": [], "parameters": "lora", "metrics": {}, "environment": {},
    "canary": {"prompts": [], "logprobs": [], "max_abs": 0.0, "mean_abs": 0.0, "base": [], "rounding": 0.0},
}  # fmt: skip
"""As every artd before losses of packages wrote it."""
NEVER = "raise SystemExit('the daemon imported a loss')\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages that this process sees."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def install(
    site: Path,
    package: str,
    points: dict[str, str],
    version: str = "1.0",
    code: str = NEVER,
    group: str = "artd.losses",
) -> None:
    """As pip leaves a package."""
    (site / package).mkdir(exist_ok=True)
    (site / package / "__init__.py").write_text(code)
    info = site / f"{package}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
    )


def test_it_is_found_copied_and_not_imported(site: Path, tmp_path: Path) -> None:
    install(site, "toy_gspo", {"toy": "toy_gspo:gspo"})
    (site / "toy_gspo" / "parts").mkdir()
    (site / "toy_gspo" / "parts" / "__init__.py").write_text(NEVER)
    found = install_packages(tmp_path)
    code = found.losses.codes["toy"]
    assert (code.target, code.distribution, code.version) == ("toy_gspo:gspo", "toy_gspo", "1.0")
    assert not found.losses.refused
    files = read_tree(tmp_path / "code" / code.digest)
    assert files.keys() == {"toy_gspo/__init__.py", "toy_gspo/parts/__init__.py"}
    assert digest_files(files) == code.digest and installed_files(code) == files
    assert "toy_gspo" not in sys.modules


def test_another_version_is_another_copy_and_both_stay(site: Path, tmp_path: Path) -> None:
    install(site, "toy_gspo", {"toy": "toy_gspo:gspo"})
    first = install_packages(tmp_path).losses.codes["toy"]
    (site / "toy_gspo" / "__init__.py").write_text(NEVER + "# mended\n")
    second = install_packages(tmp_path).losses.codes["toy"]
    assert first.digest != second.digest and installed_files(first) is None
    for code in (first, second):
        assert digest_files(read_tree(tmp_path / "code" / code.digest)) == code.digest


def test_a_module_of_one_file(site: Path, tmp_path: Path) -> None:
    install(site, "some", {"toy": "one_file:gspo"})
    (site / "one_file.py").write_text(NEVER)
    code = install_packages(tmp_path).losses.codes["toy"]
    assert read_tree(tmp_path / "code" / code.digest) == {"one_file.py": NEVER.encode()}


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ({"cispo": "toy:x"}, "a name that artd itself has"),
        ({"toy": "toy"}, "package.module:function"),
        ({"Big": "toy:x"}, "lower-case"),
        ({"toy": "artd_workers.trainer:x"}, "neither a module nor a package"),
        ({"toy": "not_there:x"}, "neither a module nor a package"),
        ({"toy": "spaced.inner:x"}, "neither a module nor a package"),
        ({"toy": "zlib:x"}, "neither a module nor a package"),
    ],
)
def test_what_cannot_be_used_is_refused_and_stops_nothing(
    site: Path, tmp_path: Path, points: dict[str, str], says: str
) -> None:
    install(site, "toy", {"fine": "toy:fine"} | points)
    (site / "spaced" / "inner").mkdir(parents=True)
    found = install_packages(tmp_path).losses
    (kind,) = points
    assert says in found.refused[kind] and found.codes.keys() == {"fine"}


def test_a_package_that_cannot_be_read_stops_no_start(site: Path, tmp_path: Path) -> None:
    """Whatever another package brings: here a file whose name is no UTF-8."""
    install(site, "toy", {"fine": "toy:fine"})
    install(site, "other", {"toy": "other:gspo"})
    Path(os.fsdecode(os.fsencode(site / "other") + b"/\xff.py")).write_text("")
    found = install_packages(tmp_path).losses
    assert found.codes.keys() == {"fine"} and found.refused.keys() == {"toy"}


@pytest.mark.parametrize(
    "damage",
    [
        ("entry_points.txt", b"[artd.losses]\ntoy\n"),
        ("entry_points.txt", b"[artd.losses]\n\xff\xfe = x:y\n"),
        ("METADATA", b""),
    ],
    ids=["no-value", "no-utf8", "no-name"],
)
def test_another_package_with_malformed_metadata_stops_no_start(
    site: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: tuple[str, bytes]
) -> None:
    install(site, "toy", {"fine": "toy:fine"})
    install(site, "alien", {"x": "alien:x"}, group="console_scripts")
    (site / "alien-1.0.dist-info" / damage[0]).write_bytes(damage[1])
    assert install_packages(tmp_path).losses.codes.keys() == {"fine"}
    assert "alien-1.0.dist-info cannot be read" in caplog.text


def test_a_model_family_is_found_by_its_architecture(site: Path, tmp_path: Path) -> None:
    install(
        site,
        "toy_family",
        {"ToyForCausalLM": "toy_family:plan", "LlamaForCausalLM": "toy_family:x"},
        group="artd.models",
    )
    found = install_packages(tmp_path)
    code = found.families.codes["ToyForCausalLM"]
    assert found.of_run("cispo", "ToyForCausalLM") == RunCode(None, code) and found.of_run("cispo", "x") == RunCode()
    assert "a name that artd itself has" in found.families.refused["LlamaForCausalLM"] and not found.losses.codes
    check_family("/m", "ToyForCausalLM", found.families)
    with pytest.raises(
        Invalid, match=r"/m has architecture Bert: .*LlamaForCausalLM.*ToyForCausalLM \(toy_family 1.0\)"
    ):
        check_family("/m", "Bert", found.families)
    (tmp_path / "seeded.json").write_text("{}")
    with pytest.raises(Invalid, match="draws weights for its own families"):
        check_family(str(tmp_path), "ToyForCausalLM", found.families)


def test_copies_that_no_checkpoint_names_are_deleted_after_a_day(site: Path, tmp_path: Path) -> None:
    install(site, "toy_gspo", {"toy": "toy_gspo:gspo"})
    data = DataDir.make(tmp_path / "data")
    digests = []
    for text in ("named", "unnamed", "recent", "present"):
        (site / "toy_gspo" / "__init__.py").write_text(f"# {text}\n")
        digests.append(install_packages(data.root).losses.codes["toy"])
    named, unnamed, recent, present = digests
    theirs = data.code / "my-notes", data.code / ("a" * 12)
    theirs[0].mkdir()
    theirs[1].symlink_to(theirs[0])
    for path in (data.code / named.digest, data.code / unnamed.digest, data.code / present.digest, theirs[0]):
        os.utime(path, (0, 0))
    manifest = data.checkpoints / "r" / "step" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_bytes(b"{")
    assert delete_copies(data, {present.digest}) == []  # a manifest that cannot be read may name any
    manifest.write_bytes(to_json(MANIFEST | {"loss": named}))
    assert delete_copies(data, {present.digest}) == [unnamed.digest]
    left = {code.digest for code in (named, recent, present)} | {path.name for path in theirs}
    assert {path.name for path in data.code.iterdir()} == left


def test_two_packages_of_one_name_are_refused(site: Path, tmp_path: Path) -> None:
    install(site, "first", {"toy": "first:x"})
    install(site, "second", {"toy": "second:x"})
    assert "several packages offer it (first, second)" in install_packages(tmp_path).losses.refused["toy"]


def test_a_replay_takes_the_copy_of_the_digest_or_nothing(site: Path, tmp_path: Path) -> None:
    install(site, "toy_gspo", {"toy": "toy_gspo:gspo"})
    data = tmp_path / "data"
    code = install_packages(data).losses.codes["toy"]
    (site / "toy_gspo" / "__init__.py").write_text("# a later version\n")
    copied = Path(copy_code(data, code, tmp_path / "scratch"))
    assert read_tree(copied) == {"toy_gspo/__init__.py": NEVER.encode()} and data not in copied.parents
    (data / "code" / code.digest / "toy_gspo" / "__init__.py").write_text("# not what was trained with\n")
    with pytest.raises(CliError, match="is damaged: its files have the digest") as error:
        copy_code(data, code, tmp_path / "scratch")
    assert error.value.code == FAILED
    shutil.rmtree(data / "code")
    with pytest.raises(CliError, match="is gone, and no package with the same files") as error:
        copy_code(data, code, tmp_path / "scratch")
    assert error.value.code == NOT_FOUND
    (site / "toy_gspo" / "__init__.py").write_text(NEVER)
    assert Path(copy_code(data, code, tmp_path / "scratch")).name == code.digest


@pytest.mark.asyncio
async def test_a_run_with_an_unknown_loss_is_refused_with_what_is_known(site: Path, tmp_path: Path) -> None:
    install(site, "toy_gspo", {"toy": "toy_gspo:gspo"})
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 50}))
    (folder / "a.safetensors").write_bytes(b"x")

    async def create(runs: Runs, loss: LossSpec) -> None:
        await runs.create(api.CreateRun(name="r", spec=RunSpec(model=str(folder), loss=loss)))

    async with open_store(tmp_path) as store:
        for packages, loss, where, says in (
            (NO_PACKAGES, LossSpec(kind="toy"), "spec.loss.kind", "no package.* Known: .*cispo.* Use one"),
            (
                install_packages(tmp_path),
                LossSpec(kind="none"),
                "spec.loss.kind",
                r"cispo.*, toy \(toy_gspo 1.0\).*'none'",
            ),
            (
                Packages(Offers(LOSS, refused={"none": "it is broken"})),
                LossSpec(kind="none"),
                "spec.loss.kind",
                "it is broken",
            ),
            (NO_PACKAGES, LossSpec(params={"clip": 1.0}), "spec.loss.params", "'cispo' has no parameter 'clip'"),
            (NO_PACKAGES, LossSpec(clip_low=0.1), "spec.loss.clip_low", "'cispo' has no such bound"),
        ):
            with pytest.raises(Invalid, match=says) as error:
                await create(Runs(store, lambda _: None, EVERY_STEP, packages=packages), loss)
            assert error.value.field == where
        assert await count(store, "run") == 0
        known = Runs(store, lambda _: None, EVERY_STEP, packages=install_packages(tmp_path))
        await create(known, LossSpec(kind="toy", params={"clip": 0.5}))
        assert await count(store, "run") == 1
    assert "toy_gspo" not in sys.modules


def test_the_spec_keeps_its_bytes_and_tells_parameters_apart() -> None:
    """`spec_digest` of every checkpoint that there is hangs on them."""
    assert msgspec.json.encode(LossSpec()) == b'{"kind":"cispo","clip_high":5.0,"normalise":"token"}'
    plain, clipped, other = (
        RunSpec(model="m", loss=LossSpec(**fields))
        for fields in ({}, {"params": {"clip": 0.1}}, {"params": {"clip": 0.1, "more": 1.0}})
    )
    for spec in (plain, clipped, other):
        assert msgspec.json.decode(msgspec.json.encode(spec), type=RunSpec) == spec
        assert first_difference(spec, spec) is None
    assert to_json(msgspec.convert(MANIFEST, CheckpointManifest)) == to_json(MANIFEST)
    assert first_difference(plain, clipped) == first_difference(clipped, plain) == "loss.params"
    assert first_difference(clipped, other) == first_difference(other, clipped) == "loss.params.more"


@pytest.mark.parametrize(
    "loss",
    [
        {"kind": "No"}, {"kind": ""}, {"kind": "a" * 65}, {"kind": "../x"}, {"params": {}}, {"params": {"X": 1.0}},
        {"params": {"x": 1e10}}, {"params": {"x": "y"}}, {"params": {f"p{i}": 1.0 for i in range(65)}},
    ],
    ids=str,
)  # fmt: skip
def test_what_no_loss_could_be_is_no_spec(loss: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(loss, LossSpec)

"""The documents tell of everything that is printed and measured."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from artd.cli import outcome
from artd.cli.verbs import find_verbs
from artd_schema.run.spec import RunSpec
from tests.cli.test_help import parsers

ROOT = Path(__file__).parents[2]
TRAINER = ROOT / "workers/artd_workers/trainer"
FREE = {"spec", "metrics", "seconds", "data"}  # columns whose inner keys belong to others


def keys(value: object) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(keys, value)) if value else set()
    if isinstance(value, dict):
        inner = (keys(v) for k, v in value.items() if k not in FREE)
        return set(value) | set().union(*inner)
    return set()


@pytest.mark.parametrize("path", sorted((ROOT / "tests/cli/golden").glob("*.json")), ids=lambda path: path.stem)
def test_every_key_is_documented(path: Path) -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs/cli-json.md").read_text()))
    found = {key for key in keys(json.loads(path.read_text())) if not key.endswith("_iso")}
    assert found <= words, found - words


def test_every_field_of_a_run_stands_with_its_default() -> None:
    parts = re.split(r"\n`(lora|optimizer|loss|engine|trainer)`[, (:]", (ROOT / "docs/run.md").read_text())
    told = dict(zip(["", *parts[1::2]], parts[::2], strict=True))
    for name, spec in (
        {"": RunSpec} | {f.name: f.type for f in msgspec.structs.fields(RunSpec) if f.name in told}
    ).items():
        rows = dict(re.findall(r"\n\| `(\w+)` \| (?:`(.*?)`)? ?\|", told[name]))
        fields = [field for field in msgspec.structs.fields(spec) if field.name not in told]
        assert list(rows) == [field.name for field in fields], name
        for field in fields:
            unset = field.required or field.default is msgspec.UNSET
            value = field.default if field.default is not msgspec.NODEFAULT or unset else field.default_factory()
            assert rows[field.name] == ("" if unset else json.dumps(value)), field.name


@pytest.mark.parametrize("command", ["artctl", "artd"])
def test_every_verb_with_json_has_its_schema_documented(command: str) -> None:
    text = (ROOT / "docs/cli-json.md").read_text()
    documented = {
        verb for verb in find_verbs(command) if f"{command}.{verb}/1" in text or f"`{command} {verb} " in text
    }
    with_json = {parser.prog.split()[1] for parser in parsers(command) if "--json" in parser._option_string_actions}
    assert with_json and with_json <= documented, with_json - documented
    assert command == "artd" or {"status", "jobs", "job", "logs", "key", "backup", "gc"} <= with_json


def test_every_exit_code_is_documented_and_used() -> None:
    text = (ROOT / "docs/cli-json.md").read_text()
    codes = {name: value for name, value in vars(outcome).items() if name.isupper() and isinstance(value, int)}
    assert sorted(codes.values()) == [0, 1, 2, 3, 4, 5, 6, 7, 130]
    for value in codes.values():
        assert f"| {value} | " in text


def test_every_metric_is_defined() -> None:
    told = set(re.findall(r"`(?:seconds\.)?(\w+)`", (ROOT / "docs/metrics.md").read_text()))
    losses, measures, step, trainer, lost = (
        TRAINER / name
        for name in ("step/losses.py", "step/measures.py", "step/step.py", "trainer.py", "checkpoint/merge_loss.py")
    )
    measured = set(re.findall(r'"(\w+)": float\(', measures.read_text() + trainer.read_text()))
    measured |= set(re.findall(r'out\["(\w+)"\]', measures.read_text()))
    measured |= set(re.findall(r'"(\w+)": (?:quantile|total|norm|sum)', measures.read_text() + step.read_text()))
    for name in ("losses", "corrections", "penalties"):
        measured |= set(re.findall(r'"(\w+)": Mean', losses.with_stem(name).read_text()))
    measured |= set(re.findall(r'"(merge_\w+)"', lost.read_text()))
    assert {
        "loss",
        "grad_norm",
        "clipped_fraction",
        "correction_mean",
        "kl_reference",
        "kl_k3",
        "mismatch_mae",
        "ratio_p95",
        "tokens_per_s",
        "reward_mean",
    } <= measured
    assert {"merge_changed", "merge_served", "merge_kl"} <= measured
    assert measured <= told, measured - told
    spent = set(re.findall(r'seconds\["(\w+)"\]', trainer.read_text()))
    engine = (ROOT / "workers/artd_workers/engines/push.py").read_text()
    spent |= set(re.findall(r'_time_phase\("(\w+)"', engine))
    assert {"train", "stage", "verify"} <= spent <= told, spent - told


PAGES = ["README.md", "CHANGELOG.md", "SECURITY.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


def anchors(path: Path) -> set[str]:
    """Return the fragments by which GitHub knows the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def test_links_of_the_documents_lead_somewhere() -> None:
    for path in [*map(ROOT.joinpath, PAGES), *(ROOT / "docs/adr").glob("*.md")]:
        for target, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", path.read_text()):
            there = path.parent / target if target else path
            assert there.exists(), f"{path.name}: {target}"
            assert not anchor or anchor in anchors(there), f"{path.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES)
def test_paths_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for name in re.findall(r"`((?:artd|workers|schema|client/artd_client|tests|examples|docs|\.ci)/[\w./-]+)`", text):
        assert (ROOT / name).exists(), name


def test_each_hop_of_the_walks_begins_with_a_file() -> None:
    text = (ROOT / "docs/walks.md").read_text()
    for walk, least in (("I am one trajectory", 70), ("I am one weight push (direct path)", 40)):
        lines = re.findall(r"^(\d+)\. (?:`([\w./]+\.py)`)?", text.partition(f"## {walk}\n")[2].split("\n## ")[0], re.M)
        assert [int(number) for number, _ in lines] == list(range(1, len(lines) + 1)) and len(lines) >= least
        assert all(path and (ROOT / path).is_file() for _, path in lines), lines

"""Models by name: fetched from a Hub on this machine, pinned by commit and digest, and taken by `run(model=…)`."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from artd.errors import Invalid
from artd.models import names
from artd.models.fetcher import Fetcher
from artd.models.hub import _mark
from artd.runs.lifecycle import Runs
from artd.supervise import procfs
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from tests.awake import SOON_S, until
from tests.fakes.rows import EVERY_STEP, one, open_store
from tests.hub import COMMIT, Hub

CONFIG = json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 50}).encode()
FILES = {
    "config.json": CONFIG, "model.safetensors": bytes(range(256)) * 4096, "tokenizer.json": b"{}", "README.md": b"# no",
    "original/consolidated.00.pth": b"no", "pytorch_model.bin": b"no",
}  # fmt: skip
WANTED = {"config.json", "model.safetensors", "tokenizer.json"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub(dict(FILES))
    for name, value in (
        ("HF_ENDPOINT", made.url),
        ("HF_HOME", str(tmp_path / "hf")),
        ("XDG_DATA_HOME", str(tmp_path / "xdg")),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    yield made
    made.close()


def fetch(name: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "artd.cli.main", "model", "fetch", name]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def folder() -> Path:
    return names.root() / "hub" / "ORG" / "toy" / COMMIT


@pytest.mark.parametrize(
    ("text", "repo", "revision"),
    [("ORG/toy", "ORG/toy", ""), ("ORG/toy@main", "ORG/toy", "main"), ("a.b/c-d_e@refs/pr/1", "a.b/c-d_e", "refs/pr/1"),
     ("smollm2-135m-instruct", "", ""), ("/a/b", None, None), ("a/b/c", None, None), ("foo", None, None),
     ("../b", None, None), ("a/..", None, None), ("~/x", None, None), ("a/b@", None, None)],
)  # fmt: skip
def test_what_is_a_name_and_what_a_path(text: str, repo: str | None, revision: str | None) -> None:
    found = names.parse(text)
    assert (found.repo, found.revision) == (repo, revision) if found else repo is None


def test_a_model_comes_at_one_commit_with_what_a_model_is_made_of_and_nothing_else(hub: Hub) -> None:
    done = fetch("ORG/toy")
    assert done.returncode == 0 and done.stdout == f"{folder()}\n", done.stderr
    assert {path.name for path in folder().iterdir()} == WANTED | {names.MARKER}
    assert all((folder() / name).read_bytes() == FILES[name] for name in WANTED)
    marker = json.loads((folder() / names.MARKER).read_text())
    assert marker["revision"] == COMMIT
    assert marker["files"]["model.safetensors"] == hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    assert not [path for path in folder().parent.iterdir() if path != folder()]
    hub.asked.clear()
    for again in ("ORG/toy", f"ORG/toy@{COMMIT[:8]}"):  # what is here needs no network
        assert fetch(again).stdout == f"{folder()}\n"
    assert hub.asked == []
    assert fetch("ORG/toy@main").stdout == f"{folder()}\n" and not [one for one in hub.asked if "resolve" in one]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_what_came_damaged_is_refused_and_comes_again_the_next_time(hub: Hub, name: str) -> None:
    hub.sent[name] = bytes(len(FILES[name]))
    done = fetch("ORG/toy")
    assert done.returncode == 1 and f"{name} arrived damaged" in done.stderr and not folder().exists()
    hub.sent.clear()
    assert fetch("ORG/toy").returncode == 0
    assert (folder() / name).read_bytes() == FILES[name]


def test_what_the_hub_does_not_have_is_one_line_with_the_next_step(hub: Hub) -> None:
    for name, said in (("ORG/none", "the Hub has no model ORG/none"), ("ORG/toy@v9", "has no revision 'v9'")):
        done = fetch(name)
        assert done.returncode == 1 and said in done.stderr and "\nnext: " in done.stderr, done.stderr
        assert "Traceback" not in done.stderr
    del hub.files["model.safetensors"]
    assert "holds no config.json with *.safetensors" in fetch("ORG/toy").stderr
    hub.close()
    done = fetch("ORG/toy")
    assert done.returncode == 1 and "cannot be fetched from the Hub" in done.stderr and "HF_ENDPOINT" in done.stderr


def test_a_fetch_that_was_killed_goes_on_where_it_was(hub: Hub) -> None:
    hub.large.clear()
    hub.files["model.safetensors"] = FILES["model.safetensors"]
    child = subprocess.Popen(
        [sys.executable, "-m", "artd.cli.main", "model", "fetch", "ORG/toy"], stdout=subprocess.DEVNULL
    )
    try:
        _until(lambda: any("GET" in one and "resolve" in one for one in hub.asked))
        hub.gate.clear()
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    hub.gate.set()
    assert not folder().exists() or names.local(names.parse("ORG/toy")) == folder()
    assert (
        fetch("ORG/toy").returncode == 0 and (folder() / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    )


def _until(condition) -> None:
    end = time.monotonic() + SOON_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# ---- in the daemon ------------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_run_takes_a_name_and_is_pinned_to_the_commit_and_the_digests(hub: Hub, tmp_path: Path) -> None:
    async with open_store(tmp_path) as store:
        runs = Runs(store, lambda _: None, EVERY_STEP)
        create = api.CreateRun(name="r", spec=RunSpec(model="ORG/toy"))
        info = await _made(runs, create)
        assert info.created and info.spec.model == str(folder())
        manifest = json.loads(await one(store, "SELECT base_manifest FROM run"))
        assert {file["name"]: file["sha256"] for file in manifest["files"]} == {
            name: hashlib.sha256(FILES[name]).hexdigest() for name in WANTED
        }
        hub.asked.clear()
        for same in ("ORG/toy", f"ORG/toy@{COMMIT}", str(folder())):  # the same program again attaches
            assert not (await _made(runs, api.CreateRun(name="r", spec=RunSpec(model=same)))).created
        assert hub.asked == []
        with pytest.raises(Exception, match="`model` differs"):
            await runs.create(api.CreateRun(name="r", spec=RunSpec(model="ORG/other")))
        with pytest.raises(Exception, match="`model` differs"):
            await runs.create(api.CreateRun(name="r", spec=RunSpec(model="ORG/toy@v2")))


async def _made(runs: Runs, create: api.CreateRun) -> api.RunInfo:
    while isinstance(answer := await runs.create(create), api.Pending):
        assert answer.doing
    return answer


@pytest.mark.asyncio
async def test_while_it_comes_who_asks_hears_how_far_it_is_and_the_loop_goes_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artd.models.fetcher.WAIT_S", 0.1)
    hub.gate.clear()
    fetcher, told, late = Fetcher(), [], 0.0
    end = time.monotonic() + SOON_S
    while not any("fetching: " in text for text in told):
        before = time.monotonic()
        told.append(await fetcher.get("ORG/toy"))
        late = max(late, time.monotonic() - before)
        assert time.monotonic() < end, told
    assert " of 1 MB, " in told[-1]
    (fetch,) = fetcher._under_way.values()
    hub.gate.set()
    while isinstance(found := await fetcher.get("ORG/toy"), str):
        await asyncio.sleep(0.05)
    assert found.path == str(folder()) and fetch.task.done()
    with pytest.raises(Invalid, match="the Hub has no model ORG/none"):
        while True:
            await fetcher.get("ORG/none")


@pytest.mark.asyncio
async def test_what_a_fetch_came_to_is_not_told_for_ever_and_a_newer_one_is_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artd.models.fetcher.WAIT_S", 0.01)
    monkeypatch.setattr("artd.models.fetcher.KEPT_S", 0.3)
    log = tmp_path / "runs"
    script = f"open({str(log)!r}, 'a').write('x'); import sys; print('{{\"error\": \"network\"}}'); sys.exit(1)"
    fetcher = Fetcher((sys.executable, "-c", script))
    assert isinstance(await fetcher.get("ORG/toy"), str)
    (first,) = fetcher._under_way.values()
    await asyncio.wait([first.task])
    with pytest.raises(Invalid, match="network"):
        await fetcher.get("ORG/toy")  # who asks again soon hears of it, and nobody else does
    assert log.read_text() == "x" and not fetcher._under_way
    assert isinstance(await fetcher.get("ORG/toy"), str)
    (second,) = fetcher._under_way.values()
    fetcher._forget("ORG/toy", first)
    assert fetcher._under_way == {"ORG/toy": second}
    await asyncio.wait([second.task])
    await until(lambda: not fetcher._under_way)  # nobody asked
    assert isinstance(await fetcher.get("ORG/toy"), str)
    await asyncio.wait([fetch.task for fetch in fetcher._under_way.values()])
    assert log.read_text() == "xxx"


def test_a_folder_is_of_every_revision_that_it_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    folder().mkdir(parents=True)
    for revision in ("main", "v1", "main", ""):
        _mark(folder(), names.Name("", "ORG/toy", revision), COMMIT, [])
    assert json.loads((folder() / names.MARKER).read_text())["asked"] == ["", "main", "v1"]
    fits = {
        "main": True,
        "v1": True,
        "": True,
        "v2": False,
        COMMIT: True,
        COMMIT[:7]: True,
        COMMIT[:6]: False,
        "4": False,
    }
    assert {one: names.is_of(str(folder()), names.Name("", "ORG/toy", one)) for one in fits} == fits


def test_a_childs_download_ends_with_the_daemon(hub: Hub, tmp_path: Path) -> None:
    hub.gate.clear()
    daemon = subprocess.Popen(
        [sys.executable, "-c", "import asyncio; from artd.models.fetcher import Fetcher; f = Fetcher()\n"
         "async def go():\n    while True: await f.get('ORG/toy')\nasyncio.run(go())"]
    )  # fmt: skip
    try:
        _until(lambda: any("GET" in one and "resolve" in one for one in hub.asked))
        (child,) = [stat for stat in procfs.all_stats() if stat.ppid == daemon.pid and not stat.dead]
    finally:
        os.kill(daemon.pid, signal.SIGKILL)
        daemon.wait()
    _until(lambda: (found := procfs.read_stat(child.pid)) is None or found.dead or found.ticks != child.ticks)

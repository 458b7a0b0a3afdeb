"""`artd dashboard`: what it answers over a folder without a daemon, to whom, and that it writes nothing. Browsers: tests/e2e/test_dashboard.py."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import anyio
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from artd.cli.dashboard import live
from artd.cli.dashboard.app import make_app
from artd.cli.dashboard.auth import COOKIE
from tests.cli.conftest import FakeDaemon
from tests.cli.rows import Made
from tests.cli.test_samples import NASTY, talk  # noqa: F401 - a fixture

TOKEN = "a-token-of-this-test"
BEARER = {"authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def page(data: Path) -> Iterator[TestClient]:
    with TestClient(make_app(data, TOKEN), headers=BEARER, raise_server_exceptions=False) as client:
        yield client


def test_whoever_has_no_token_reads_nothing(made: Made, data: Path) -> None:
    with TestClient(make_app(data, TOKEN), follow_redirects=False) as client:
        for path in ("/", "/api/overview", "/api/live", "/metrics", "/static/app.js", "/?token=wrong"):
            answer = client.get(path)
            assert answer.status_code == 401 and "artd dashboard" in answer.text and "toy" not in answer.text
        entered = client.get(f"/?token={TOKEN}")
        assert (entered.status_code, entered.headers["location"]) == (303, "/")
        assert "HttpOnly" in (cookie := entered.headers["set-cookie"]) and "SameSite=strict" in cookie
        assert client.cookies[COOKIE] == TOKEN
        assert client.get("/api/overview").status_code == 200
        client.cookies.clear()
        assert client.get("/healthz").json()["health"] == "down"


def test_no_answer_may_run_a_script_that_is_not_a_file_of_artd(made: Made, page: TestClient) -> None:
    for path in ("/", "/api/overview", "/metrics", "/healthz", "/nowhere", "/static/app.js", "/api/runs/none/metrics"):
        headers = page.get(path).headers
        assert "default-src 'none'; script-src 'self';" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
    static = Path(make_app.__code__.co_filename).with_name("static")
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bon\w+=|style=", (static / "index.html").read_text())
    scripts = "".join(path.read_text() for path in static.glob("*.js"))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", scripts)


def test_the_overview_is_the_status(made: Made, page: TestClient) -> None:
    told = page.get("/api/overview").json()
    assert told["health"] == "down" and told["run"]["name"] == "toy" and told["problems"]
    assert [run["name"] for run in page.get("/api/runs").json()] == ["toy", "old"]


def test_curves_have_one_value_a_step(data: Path, frozen: None, page: TestClient) -> None:
    made = Made(data)
    run = made.run("toy", "active", 3)
    for step, metrics in ((1, {"loss": 0.5}), (2, {"loss": 0.25, "kl_k3": 0.1}), (3, {"loss": float("nan")})):
        told = {"metrics": metrics, "seconds": {"train": float(step)}}
        job = made.job(run, "train", step, "succeeded", batch_id=made.batch(run, step, "trained"), **told)
        made.checkpoint(run, step, job)
    told = page.get("/api/runs/toy/metrics").json()
    assert told["steps"] == [1, 2, 3] and told["known"] == ["kl_k3", "loss"]
    assert told["metrics"] == {"kl_k3": [None, 0.1, None], "loss": [0.5, 0.25, None]}
    assert told["seconds"] == {"train": [1.0, 2.0, 3.0]}
    assert list(page.get("/api/runs/toy/metrics?name=loss").json()["metrics"]) == ["loss"]


def test_the_timeline_has_the_work_of_a_step(data: Path, frozen: None, page: TestClient) -> None:
    made = Made(data)
    run = made.run("toy", "active", 1)
    batch = made.batch(run, 1, "trained")
    group = made.group(run, "g", "trained")
    for key, created in (("a", 1000), ("b", 4000)):
        made.trajectory(run, group, key, state="trained", batch_id=batch, created=created)
    job = made.job(run, "train", 1, "succeeded", batch_id=batch, started=6000, ended=9000)
    made.checkpoint(run, 1, job)
    bars = page.get("/api/runs/toy/timeline").json()
    assert [(bar["lane"], bar["kind"], bar["step"], bar["start"]) for bar in bars] == [
        ("rollouts", "rollouts", 1, 1000), ("packer", "pack", 1, 4000), ("trainer", "train", 1, 6000),
    ]  # fmt: skip
    assert bars[0]["end"] == 4000 and bars[2]["end"] == 9000


def test_tables_page_and_refuse_by_name(talk: Made, page: TestClient) -> None:  # noqa: F811
    ids = [row["id"] for row in page.get("/api/tables/trajectories?run=toy&limit=2").json()]
    assert ids == [5, 4]
    assert [row["id"] for row in page.get(f"/api/tables/trajectories?before={ids[-1]}&limit=9").json()] == [3, 2, 1]
    assert [row["id"] for row in page.get("/api/tables/trajectories?state=queued&split=train").json()] == [4]
    for path, status, said in (
        ("tables/nothing", 404, "there is no table 'nothing'"),
        ("tables/jobs?state=done", 400, "no state done"),
        ("tables/jobs?run=other", 404, "there is no run 'other'"),
        ("tables/jobs?before=x", 400, "before='x' is not a whole number"),
        (f"tables/jobs?after={'9' * 19}", 200, "[]"),
        ("runs/other/timeline", 404, "there is no run 'other'"),
        ("trajectories/99999999999999999999", 404, "there is no trajectory"),
    ):
        answer = page.get(f"/api/{path}")
        assert (answer.status_code, said in answer.text) == (status, True), answer.text


def test_a_trajectory_has_its_messages_and_tokens(talk: Made, page: TestClient) -> None:  # noqa: F811
    answer = page.get("/api/trajectories/3")
    [sequence] = answer.json()["sequences"]
    assert sequence["messages"][-1]["text"] == NASTY and sequence["tokens"][-1]["epoch"] == 2
    assert not re.search(r"[\x00-\x1f\x7f-\x9f]", answer.text), "raw control characters"


def test_metrics_are_what_prometheus_reads(made: Made, page: TestClient, data: Path) -> None:
    daemon = FakeDaemon(data)
    answer = page.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert found["artd_up", ("version", "9.9.9")] == 1.0
    assert found["artd_run_step", ("run", "toy")] == 2.0
    assert found["artd_run_state", ("run", "toy"), ("state", "active")] == 1.0
    status = page.get("/api/overview").json()
    for state, counted in status["groups"]["train"].items():
        assert found["artd_groups", ("run", "toy"), ("split", "train"), ("state", state)] == counted["groups"]
    daemon.handle.close()


@pytest.mark.asyncio
async def test_an_open_page_hears_of_each_commit_and_of_the_daemon(made: Made, data: Path, monkeypatch) -> None:
    monkeypatch.setattr(live, "LOOK_S", 0.01)
    watcher = live.Watcher(data)
    heard: list[dict[str, object]] = []

    async def listen() -> None:
        async for message in watcher.stream():
            heard.append(json.loads(message.partition(b"data: ")[2] or b"{}"))

    async def until(count: int) -> None:
        with anyio.fail_after(20):
            while len(heard) < count:
                await anyio.sleep(0.01)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watcher.run)
        await anyio.sleep(0.05)
        assert watcher.mark.event == -1, "nobody looks, so it does not look either"
        tasks.start_soon(listen)
        await until(2)
        before = len(heard)
        made.row("event", at=1, kind="step.committed")
        await until(before + 1)
        assert heard[-1]["event"] == 1 + int(str(heard[before - 1]["event"])) and heard[-1]["daemon"] == "stopped"
        daemon = FakeDaemon(data)
        await until(before + 2)
        assert heard[-1]["daemon"] == "ready"
        daemon.handle.close()
        tasks.cancel_scope.cancel()
    watcher.close()
    assert watcher.pages == 0


def test_the_verb_serves_a_folder_and_leaves_it_as_it_was(made: Made, data: Path, tmp_path: Path) -> None:
    made.connection.close()
    copy = tmp_path / "copy"
    copy.mkdir()
    (copy / "artd.db").write_bytes((data / "artd.db").read_bytes())
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    command = [sys.executable, "-m", "artd", "dashboard", str(copy), "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
    ) as child:
        assert child.stdout is not None
        said = child.stdout.readline()
        try:
            import httpx

            found = re.search(r"(http://127\.0\.0\.1:\d+)/\?token=([\w-]{32})$", said.strip())
            assert found, said
            answer = httpx.get(f"{found[1]}/api/runs", headers={"authorization": f"Bearer {found[2]}"}, timeout=30)
            assert [run["name"] for run in answer.json()] == ["toy", "old"]
        finally:
            child.send_signal(signal.SIGINT)
            assert child.wait(30) in (0, 130)
    assert {path.name: path.read_bytes() for path in copy.iterdir() if path.suffix == ".db"} == before


def test_a_folder_without_a_database_and_a_port_in_use_are_refused(made: Made, tmp_path: Path, artctl) -> None:
    code, _, err = artctl("dashboard", str(tmp_path / "nothing"))
    assert code == 3 and "no daemon has run on" in err
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = artctl("dashboard", str(made.data), "--port", str(port))
    assert code == 1 and f"cannot listen at 127.0.0.1:{port}" in err and "--port 0" in err

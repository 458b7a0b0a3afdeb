"""The dashboard in a real headless Chromium: every page, wide and on a phone, live, and over a restart of its server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.cli.conftest import data, frozen  # noqa: F401 - fixtures
from tests.cli.rows import Made
from tests.cli.test_samples import talk  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
PROGRAM = Path(__file__).parent / "programs" / "browse_dashboard.py"
TOKEN = "a-token-of-this-test"
PORT = "18420"


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    """The interpreter of an environment with the newest playwright; the browser is Debian's or $CHROMIUM."""
    with tempfile.TemporaryDirectory(prefix="artd-p-") as name:
        subprocess.run([sys.executable, "-m", "venv", name], check=True, timeout=200)
        install = [f"{name}/bin/pip", "install", "-q", "--disable-pip-version-check", "playwright"]
        subprocess.run(install, check=True, timeout=300, stderr=subprocess.DEVNULL)
        yield f"{name}/bin/python"


def serve(folder: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "artd", "dashboard", str(folder), "--port", PORT]
    child = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"ARTD_DASHBOARD_TOKEN": TOKEN}
    )
    assert child.stdout is not None and TOKEN in child.stdout.readline()
    return child


def stop(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=30)


def hear(out: IO[str]) -> Any:
    line = out.readline()
    assert line, "the browser ended; its last words are above"
    return json.loads(line)


def test_every_page_live_and_over_a_restart(talk: Made, python: str, tmp_path: Path) -> None:  # noqa: F811
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    assert chromium, "no Chromium. Next: apt-get install chromium, or CHROMIUM=PATH"
    made, pictures = talk, tmp_path / "pictures"
    pictures.mkdir()
    server = serve(made.data)
    command = [python, str(PROGRAM), chromium, f"http://127.0.0.1:{PORT}/?token={TOKEN}", str(pictures)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as browser:
        assert browser.stdin is not None and browser.stdout is not None
        for size, width in (("wide", 1200), ("phone", 390)):
            told = hear(browser.stdout)
            assert (told["size"], told["wrong"]) == (size, [])
            for page in told["pages"]:
                assert page["width"] == width and page["title"].endswith("artd"), page
                assert "[object" not in page["text"] and "undefined" not in page["text"], page
            shown = {page["path"]: page["text"] for page in told["pages"]}
            assert "<script>alert(1)</script>\\u001b[2J" in shown["trajectory/3"]
            assert not any(char in text for text in shown.values() for char in "\x1b\u202e\u200b")
        assert hear(browser.stdout) == {"act": "opened"}
        made.row("event", at=1, kind="planted.event")
        assert hear(browser.stdout) == {"act": "live"}
        stop(server)
        browser.stdin.write("\n")
        browser.stdin.flush()
        assert hear(browser.stdout) == {"act": "lost"}
        server = serve(made.data)
        browser.stdin.write("\n")
        browser.stdin.flush()
        last = hear(browser.stdout)
        assert last["act"] == "back" and last["wrong"] == []
        browser.stdin.write("\n")
        browser.stdin.flush()
        assert browser.wait(60) == 0
    stop(server)
    assert len(list(pictures.glob("*.png"))) == 22

"""`artctl samples` and `artctl show`: text of trajectories, without a daemon, and as text alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from artd.store import samples
from artd_schema.text.plain import CONTROLS
from tests.cli.conftest import Call
from tests.cli.rows import SPEC, Made
from tests.fakes.chat_model import body, turn, write_model

ASK = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
NASTY = "<script>alert(1)</script>\x1b[2J\x1b]0;gone\x07\r\x9b31m\u202eback\u200b"
"""Markup, a cleared screen, a title, a carriage return, the one-byte CSI, and text that turns its direction."""


@pytest.fixture
def talk(data: Path, frozen: None, tmp_path: Path) -> Made:
    """A finished run: step 1 trained three answers, a fourth waits; one eval answer."""
    made = Made(data)
    run = made.run("toy", "finished", 1, spec=SPEC | {"model": str(write_model(tmp_path / "model"))})
    batch = made.batch(run, 1, "trained")
    job = made.job(run, "train", 1, "succeeded", batch_id=batch)
    made.checkpoint(run, 1, job)
    group = made.group(run, "capitals", "trained", 3)
    for key, answer, reward in (("a", "Paris.", 1.0), ("b", "Rome.", -1.0), ("c", NASTY, 0.0)):
        one = turn(ASK.format("Capital of France?"), f"{answer}<|im_end|>", policy_epoch=((0, 2),))
        state = {"state": "trained", "batch_id": batch, "reward": reward}
        made.trajectory(run, group, key, body=body(one), **state)
    waits, held = made.group(run, "more", "sealed", 1), made.group(run, "held", "open", 1, "eval")
    made.trajectory(run, waits, "d", body=body(turn(ASK.format("2+2?"), "4<|im_end|>")), reward=0.25)
    made.trajectory(run, held, "e", body=body(turn(ASK.format("3+3?"), "6")), split="eval")
    return made


def chosen(artctl: Call, *words: str) -> list[int]:
    code, out, err = artctl("samples", *words, "--json")
    assert (code, err) == (0, "")
    return [row["id"] for row in json.loads(out)["samples"]]


def test_the_text_of_a_finished_run_with_the_daemon_down(talk: Made, artctl: Call) -> None:
    code, out, err = artctl("samples", "-n", "2")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].startswith("#4   group more   reward 0.25   queued   12 tokens sampled")
    assert lines[1:3] == ["  user      2+2?", "  assistant 4"]
    assert lines[4].startswith("#3   group capitals   reward 0")


def test_which_samples(talk: Made, artctl: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(artctl) == chosen(artctl, "toy") == [4, 3, 2, 1]
    assert chosen(artctl, "--best") == [1, 4, 3, 2]
    assert chosen(artctl, "--worst", "-n", "1") == [2]
    assert sorted(chosen(artctl, "--random")) == [1, 2, 3, 4]
    assert chosen(artctl, "--step", "1") == [3, 2, 1]
    assert chosen(artctl, "--step", "7") == []
    assert chosen(artctl, "--eval") == [5]
    monkeypatch.setattr(samples, "AMONG", 2)
    assert chosen(artctl, "--best") == [4, 3]  # of the newest ones
    assert artctl("samples", "--step", "7")[1] == "step 7 of run toy has no trajectories\n"
    assert artctl("samples", "toi")[0] == artctl("show", "77")[0] == artctl("show", "9" * 30)[0] == 5
    assert artctl("samples", "--best", "--worst")[0] == 2


def test_a_step_that_waits_for_its_commit_and_one_that_a_rollback_left(talk: Made, artctl: Call) -> None:
    again = talk.batch(1, 2, "packed")
    talk.connection.execute("UPDATE trajectory SET state = 'packed', batch_id = ? WHERE id = 4", (again,))
    assert chosen(artctl, "--step", "2") == [4]
    talk.connection.execute("UPDATE checkpoint SET abandoned = 1")
    assert chosen(artctl, "--step", "1") == []


@pytest.mark.parametrize("words", [("samples", "--full"), ("samples", "--json"), ("show", "3"), ("show", "3", "--json"),
                                   ("show", "3", "--tokens"), ("show", "3", "--tokens", "--json")], ids=" ".join)  # fmt: skip
@pytest.mark.parametrize("coloured", [False, True], ids=["plain", "coloured"])
def test_what_models_wrote_is_text(words: tuple[str, ...], coloured: bool, talk: Made, artctl: Call) -> None:
    code, out, _ = artctl(*words, "--color", "always" if coloured else "never")
    assert code == 0
    own = set("0123456789;") if coloured else set()
    for rest in out.split("\x1b")[1:]:  # artd's own colours alone
        assert rest[0] == "[" and set(rest[1:].partition("m")[0]) <= own and "m" in rest
    left = {sign for sign in out.replace("\x1b", "").replace("\n", "").replace("\t", "") if ord(sign) in CONTROLS}
    assert left == set()
    if "--tokens" not in words:
        assert "<script>alert(1)</script>" in out


def test_one_trajectory(talk: Made, artctl: Call) -> None:
    code, out, _ = artctl("show", "1")
    assert code == 0 and out.splitlines()[1:] == [
        '  metrics   {"turns": 1.0}', "  user      Capital of France?", "  assistant Paris.",
    ]  # fmt: skip
    told = json.loads(artctl("show", "1", "--json")[1])["trajectory"]
    assert told["reward"] == 1.0 and told["problem"] == "" and told["created_iso"]
    [sequence] = told["sequences"]
    assert [message["role"] for message in sequence["messages"]] == ["user", "assistant"] and "tokens" not in sequence
    [sequence] = json.loads(artctl("show", "1", "--tokens", "--json")[1])["trajectory"]["sequences"]
    assert "".join(one["text"] for one in sequence["tokens"]) == ASK.format("Capital of France?") + "Paris.<|im_end|>"
    assert sequence["tokens"][-1] == {
        "id": 257, "text": "<|im_end|>", "turn": 0, "logprob": -0.5, "epoch": 2, "cache": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("view", "code"), [("mask", "1"), ("logprob", "38;5;117"), ("advantage", "38;5;75"), ("epoch", "38;5;108")]
)
def test_tokens_in_colours(view: str, code: str, talk: Made, artctl: Call) -> None:
    _advantage(talk, 0.75)
    out = artctl("show", "1", "--tokens", view, "--color", "always")[1]
    assert f"\x1b[{code}mP\x1b[0m\x1b[{code}ma" in out and "\x1b[2mF\x1b[0m" in out
    rows = [line.split("\t") for line in artctl("show", "1", "--tokens", view)[1].splitlines()[2:]]
    assert rows[0] == ["turn", "logprob", "epoch", "cache", "advantage", "token"]
    assert rows[-1] == ["0", "-0.5", "2", "", "0.75", "<|im_end|>"] and rows[1] == [""] * 5 + ["<|im_start|>"]


def _advantage(made: Made, value: float) -> None:
    packed = [{"id": 1, "digest": "", "group": 1, "reward": 1.0, "advantage": value, "rows": [0]}]
    raw = json.dumps({"trajectories": packed}).encode()
    sha = hashlib.sha256(raw).hexdigest()
    _put(made, sha, raw)
    made.connection.execute("UPDATE batch SET manifest = ?", (made.blob(sha),))


def _put(made: Made, sha: str, raw: bytes) -> None:
    path = made.data / "blobs" / sha[:2] / sha
    path.parent.mkdir(parents=True)
    path.write_bytes(raw)


def test_a_body_in_a_file_one_that_expired_and_damage(talk: Made, artctl: Call) -> None:
    def text(**change: Any) -> str:
        for name, value in change.items():
            talk.connection.execute(f"UPDATE {name.replace('__', ' SET ')} = ?", (value,))
        return artctl("show", "1")[1]

    raw = body(turn("ab", "from a file"))
    sha = hashlib.sha256(raw).hexdigest()
    _put(talk, sha, raw)
    talk.blob(sha)
    assert "from a file" in text(trajectory_data__body=None, trajectory__blob=sha)
    (talk.data / "blobs" / sha[:2] / sha).unlink()
    assert "no text   " in text() and "cannot be read: No such file" in text()
    assert "its contents have expired" in text(trajectory__blob=None, trajectory__payload="expired")
    text(trajectory__payload="kept")
    assert "its body is damaged" in text(trajectory_data__body=b"\x91\x01")


def test_without_the_model_folder_the_engine_is_quoted(talk: Made, artctl: Call, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "model")
    raw = json.dumps({"choices": [{"message": {"content": "Paris."}}]}).encode()
    talk.connection.execute(
        "UPDATE trajectory_data SET body = ? WHERE trajectory_id = 1", (body(turn("abc", "d", raw=raw)),)
    )
    out = artctl("show", "1")[1]
    assert "tokenizer.json cannot be read" in out
    assert out.splitlines()[-2:] == ["  prompt    [3 tokens]", "  assistant Paris."]
    assert artctl("show", "1", "--tokens")[0] == 0


def test_the_run_that_is_meant(talk: Made, artctl: Call) -> None:
    talk.run("newer", "finished")
    assert json.loads(artctl("samples", "--json")[1])["run"] == "newer"
    talk.run("live", "active")
    assert json.loads(artctl("samples", "--json")[1])["run"] == "live"

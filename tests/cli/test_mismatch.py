"""`artctl mismatch`: what the gateway is asked, what the trainer's interpreter is given, what is told, and what is refused.

The gateway is a small HTTP server; the interpreter is a Python script that keeps what it was given and answers what the test
says. The real ones: tests/trainer/test_score.py, `make demo-moe`.
"""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from artd_schema.codec import digest
from artd_schema.data.manifest import Canary, CheckpointManifest
from artd_schema.data.trajectory import RouteShape
from artd_schema.wire.score import REQUEST, SEQUENCES, ScoreRequest
from tests.cli.conftest import Call, FakeDaemon
from tests.cli.rows import SPEC, Made, write_checkpoint
from tests.cli.test_golden import check

SHAPE = RouteShape(layers=2, topk=2, experts=4)
VOCAB, TOP = 64, 20
Choice = dict[str, Any]
INTERPRETER = """#!{python}
import shutil, sys
folder = sys.argv[3]
assert sys.argv[1:3] == ["-m", "artd_workers.trainer.tools.score"], sys.argv
shutil.copytree(folder, {here!r} + "/asked")
print("words of the trainer", file=sys.stderr)
sys.path[:0] = {path!r}
exec(open({here!r} + "/answer.py").read())
"""
ANSWER = """
import numpy as np
from safetensors.numpy import load_file, save_file
asked = load_file(folder + "/sequences.safetensors")
scored = len(asked["candidates"])
out = {}
for name, off in (("replay", 1 / 1024), ("live", 1 / 8)):
    if name == "replay" and "routes" not in asked:
        continue
    out[name + ".logprobs"] = np.full(scored, -2.0 - off, "f4")
    out[name + ".candidates"] = (-2.0 - np.arange(20) / 8 - off * np.arange(20))[None].repeat(scored, 0).astype("f4")
    out[name + ".top_ids"] = asked["candidates"] if name == "replay" else asked["candidates"][:, ::-1].copy()
    out[name + ".top_logprobs"] = np.zeros((scored, 20), "f4")
save_file(out, folder + "/scores.safetensors")
"""


class Server(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that has enough hangs up."""


class Gateway:
    """Answers every completion from a script; keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], dict[str, Any]]] = []
        self.status, self.reply = 200, None
        self.change: Callable[[Choice], None] = lambda choice: None
        self.server = Server(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                gateway.asked.append(({k.lower(): v for k, v in self.headers.items()} | {"path": self.path}, body))
                data = json.dumps(gateway.reply or {"choices": gateway.choices(body)}).encode()
                self.send_response(gateway.status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        return Handler

    def choices(self, body: dict[str, Any]) -> list[Choice]:
        return [self.choice(body, index) for index in range(body["n"])]

    def choice(self, body: dict[str, Any], index: int) -> Choice:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else [ord(c) % VOCAB for c in body["prompt"]]
        tokens = [(index + i) % VOCAB for i in range(body["max_tokens"])]
        # 21 told: one more than the top 20, the sampled token first, as vLLM has it.
        tops = [[[30, -9.0], *([5 + k, -2.0 - k / 8] for k in range(TOP))] for _ in tokens]
        rows = np.arange((len(prompt) + len(tokens) - 1) * 4).reshape(-1, 2, 2) % 4
        file = io.BytesIO()
        np.save(file, rows.astype("u1"))
        choice = {
            "index": index, "text": "", "prompt_token_ids": prompt, "generation_token_ids": tokens,
            "generation_log_probs": [-2.0] * len(tokens), "generation_top_log_probs": tops,
            "routed_experts": base64.b64encode(file.getvalue()).decode(), "routed_experts_start": 0,
        }  # fmt: skip
        self.change(choice)
        return choice


@pytest.fixture
def gateway(data: Path) -> Iterator[Gateway]:
    made = Gateway()
    data.mkdir(exist_ok=True)
    (data / "gateway.json").write_text(json.dumps({"url": made.url, "token": "sesame"}))
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of the interpreter: what it was asked lies in `asked`, what it answers with is answer.py."""
    here = tmp_path / "here"
    here.mkdir()
    python = here / "python"
    python.write_text(INTERPRETER.format(python=sys.executable, here=str(here), path=sys.path))
    python.chmod(0o755)
    (here / "answer.py").write_text(ANSWER)
    config = here / "artd.toml"
    config.write_text(f'[runtimes.trainer]\npython = "{python}"\n')
    monkeypatch.setenv("ARTD_CONFIG", str(config))
    return here


@pytest.fixture
def moe(data: Path, frozen: None, daemon: FakeDaemon) -> Made:
    """Run `moe` at step 2, a mixture of experts."""
    made = Made(data)
    run = made.run("moe", routes=msgspec.json.encode(SHAPE), vocab_size=VOCAB, spec=SPEC | {"parameters": "full"})
    made.checkpoint(
        run,
        2,
        made.job(run, "train", 2, "succeeded", batch_id=made.batch(run, 2, "trained")),
        epoch=5,
        dir="checkpoints/moe/s2",
        sha=commit(made),
    )
    return made


def commit(made: Made) -> str:
    folder = made.data / "checkpoints/moe/s2"
    write_checkpoint(folder)
    manifest = CheckpointManifest(
        run="moe", step=2, epoch=5, lineage=0, parent="", batch="", base_digest="", spec_digest="", instance="", job=1,
        fence=1, files=(), canary=Canary(prompts=((1, 2, 3), (4, 5, 6)), logprobs=(), max_abs=0.0, mean_abs=0.0),
    )  # fmt: skip
    raw = msgspec.json.encode(manifest)
    (folder / "manifest.json").write_bytes(raw)
    return digest(raw)


def probe(artctl: Call, *words: str, tokens: int = 16) -> tuple[int, str, str]:
    return artctl("mismatch", *words, "--tokens", str(tokens), "--max-tokens", "4")


# ---- asked and answered ---------------------------------------------------------------------------------------------


def test_the_document(moe: Made, gateway: Gateway, here: Path, artctl: Call) -> None:
    code, out, _ = probe(artctl, "moe@2", "--json")
    assert code == 0
    # The last digits are the mathematics library's.
    check("mismatch", re.sub(r"\d\.\d{9,}(?:e-\d+)?", lambda found: f"{float(found[0]):.9g}", out), moe.data)


def test_the_gateway_is_asked_for_a_probe_that_is_not_trained(
    moe: Made, gateway: Gateway, here: Path, artctl: Call
) -> None:
    assert probe(artctl, "moe@2", "--seed", "7")[0] == 0
    assert sorted(body["prompt"] for _, body in gateway.asked) == [[1, 2, 3], [4, 5, 6]], "the canary's prompts"
    for headers, body in gateway.asked:
        assert headers["path"] == "/v1/completions" and headers["authorization"] == "Bearer sesame"
        assert headers["x-artd-split"] == "eval"
        assert (body["model"], body["temperature"], body["seed"]) == ("moe@2", 1.0, 7)
        assert (body["n"], body["max_tokens"], body["return_token_ids"]) == (2, 4, True)
        assert body["logprobs"] == TOP + 1, "the engine counts the sampled token among them"


def test_the_interpreter_is_given_tokens_routes_and_the_committed_checkpoint(
    moe: Made, gateway: Gateway, here: Path, artctl: Call
) -> None:
    code, _, err = probe(artctl, "moe@2")
    assert code == 0 and err == ""
    request = msgspec.json.decode((here / "asked" / REQUEST).read_bytes(), type=ScoreRequest)
    assert request.checkpoint is not None and request.routes == SHAPE and request.spec.parameters == "full"
    assert Path(request.checkpoint.dir) == moe.data / "checkpoints/moe/s2" and request.checkpoint.epoch == 5
    asked = load_file(here / "asked" / SEQUENCES)
    assert asked["lengths"].tolist() == [7] * 4 and asked["prompts"].tolist() == [3] * 4
    assert asked["tokens"].reshape(4, 7)[:2].tolist() == [[1, 2, 3, 0, 1, 2, 3], [1, 2, 3, 1, 2, 3, 4]]
    assert asked["candidates"].dtype == np.int32 and asked["candidates"].tolist() == [list(range(5, 25))] * 16
    assert asked["routes"].dtype == np.uint8 and asked["routes"].shape == (28, 2, 2)
    rows = asked["routes"].reshape(4, 7, 2, 2)
    assert (rows[:, :6] == (np.arange(24) % 4).reshape(6, 2, 2)).all(), "row j belongs to token j"
    assert (rows[:, 6] == [0, 1]).all(), "the last token was never an input"


def test_the_table(moe: Made, gateway: Gateway, here: Path, artctl: Call) -> None:
    code, out, _ = probe(artctl, "moe@2")
    lines = out.splitlines()
    assert code == 0 and lines[0] == "moe@2: 16 sampled tokens in 4 answers, temperature 1"
    assert lines[1].split() == ["replay", "on", "replay", "off"]
    assert lines[2].split() == ["MAE,", "nats", "9.766e-04", "1.250e-01"]
    assert lines[5].split() == ["top-1", "agreement", "1.0000", "0.0000"]
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "MAE, nats", "max, nats", "mean_abs_pct", "top-1 agreement", "top-20 overlap", "top-20 KL, nats",
    ]  # fmt: skip


def test_a_dense_run_has_one_column(moe: Made, gateway: Gateway, here: Path, artctl: Call) -> None:
    moe.connection.execute("UPDATE run SET routes = x'' WHERE name = 'moe'")
    gateway.change = lambda choice: choice.pop("routed_experts")
    code, out, _ = probe(artctl, "moe")
    assert code == 0 and out.splitlines()[1].split() == ["mismatch"]
    assert "routes" not in load_file(here / "asked" / SEQUENCES)


def test_rounds_go_on_until_there_are_tokens_enough(moe: Made, gateway: Gateway, here: Path, artctl: Call) -> None:
    def short(choice: Choice) -> None:
        for name in ("generation_token_ids", "generation_log_probs", "generation_top_log_probs"):
            choice[name] = choice[name][:1]
        file = io.BytesIO()
        np.save(file, np.full((3, 2, 2), [0, 1], "u1"))
        choice["routed_experts"] = base64.b64encode(file.getvalue()).decode()

    gateway.change = short
    code, out, _ = probe(artctl, "moe@2")
    assert code == 0 and out.startswith("moe@2: 16 sampled tokens in 16 answers")
    assert len({body["seed"] for _, body in gateway.asked}) == 4, "another seed in each round"


def test_prompts_of_a_file(moe: Made, gateway: Gateway, here: Path, artctl: Call, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('"abc"\n\n[9, 8]\n')
    assert probe(artctl, "moe@2", "--prompts", str(file))[0] == 0
    assert sorted(map(str, (body["prompt"] for _, body in gateway.asked))) == ["[9, 8]", "abc"]


# ---- refused --------------------------------------------------------------------------------------------------------


def broken(name: str, value: Any) -> Callable[[Choice], None]:
    def change(choice: Choice) -> None:
        choice[name] = value

    return change


NPY = io.BytesIO()
np.save(NPY, np.zeros((5, 2, 2), "u1"))
BAD: dict[str, Callable[[Choice], None]] = {
    "'routed_experts'": lambda choice: choice.pop("routed_experts"),
    "routes (5, 2, 2) instead of (6, 2, 2)": broken("routed_experts", base64.b64encode(NPY.getvalue()).decode()),
    "routes begin at token 2": broken("routed_experts_start", 2),
    "'generation_top_log_probs'": lambda choice: choice.pop("generation_top_log_probs"),
    "4 tokens with 3 logprobs": broken("generation_log_probs", [-1.0] * 3),
    "1 top ids instead of 20": broken("generation_top_log_probs", [[[1, -1.0]]] * 4),
}


@pytest.mark.parametrize("says", BAD)
def test_an_answer_that_lacks_a_part_is_an_error(
    moe: Made, gateway: Gateway, here: Path, artctl: Call, says: str
) -> None:
    gateway.change = BAD[says]
    code, out, err = probe(artctl, "moe@2")
    assert (code, out) == (1, "") and says in err and "artctl logs gateway" in err
    assert not (here / "asked").exists()


@pytest.mark.parametrize(
    ("status", "error", "code", "says"),
    [
        (404, {"code": "model_not_found", "message": "model 'moe@2' is not live"}, 6, "artctl mismatch RUN"),
        (503, {"code": "aborted", "message": "send it again"}, 1, "send it again"),
    ],
)
def test_what_the_gateway_refuses(
    moe: Made, gateway: Gateway, here: Path, artctl: Call, status: int, error: dict[str, str], code: int, says: str
) -> None:
    gateway.status, gateway.reply = status, {"error": error}
    found, _, err = probe(artctl, "moe@2")
    assert found == code and error["message"] in err and says in err


def test_no_gateway(moe: Made, gateway: Gateway, here: Path, artctl: Call) -> None:
    gateway.server.shutdown()
    gateway.server.server_close()
    code, _, err = probe(artctl, "moe@2")
    assert code == 1 and "the gateway gave no answer" in err
    (moe.data / "gateway.json").unlink()
    assert probe(artctl, "moe@2")[0] == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["moi"], 5, "did you mean moe?"),
        (["moe@9"], 5, "kept are @2"),
        (["moe@x"], 2, "not RUN or RUN@STEP"),
        (["moe", "--tokens", "0"], 2, "at least 1"),
        (["moe", "--prompts", "/nowhere"], 2, "/nowhere"),
    ],
)
def test_words(moe: Made, gateway: Gateway, artctl: Call, words: list[str], code: int, says: str) -> None:
    found, _, err = artctl("mismatch", *words)
    assert found == code and says in err
    assert gateway.asked == []


@pytest.mark.parametrize("text", ["", "3", '""', "[]", '{"a": 1}', "nonsense"])
def test_a_file_without_prompts(moe: Made, gateway: Gateway, artctl: Call, tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    code, _, err = artctl("mismatch", "moe", "--prompts", str(tmp_path / "file"))
    assert code == 2 and "one prompt a line" in err and gateway.asked == []


def test_the_daemon_has_to_run(made: Made, artctl: Call) -> None:
    code, _, err = artctl("mismatch", "toy@2")
    assert code == 3 and "artd start" in err


def test_another_manifest_is_not_used(moe: Made, gateway: Gateway, artctl: Call) -> None:
    path = moe.data / "checkpoints/moe/s2/manifest.json"
    path.write_bytes(path.read_bytes() + b" ")
    code, _, err = probe(artctl, "moe@2")
    assert code == 1 and "not the one that was committed" in err and gateway.asked == []


@pytest.mark.parametrize(
    ("answer", "code", "says"),
    [
        ("sys.exit(1)", 1, "the scoring ended with status 1"),
        ("sys.exit(130)", 130, ""),
        ("pass", 1, "the scores cannot be compared"),
        (ANSWER.replace('"live", 1 / 8', '"live", float("nan")'), 1, "not finite"),
        (ANSWER.replace('.logprobs"] = np.full(scored', '.logprobs"] = np.full(scored + 1'), 1, "scores of shapes"),
    ],
)
def test_a_trainer_that_gives_no_scores(
    moe: Made, gateway: Gateway, here: Path, artctl: Call, answer: str, code: int, says: str
) -> None:
    (here / "answer.py").write_text(answer)
    found, out, err = probe(artctl, "moe@2")
    assert (found, out) == (code, "") and says in err


def test_without_a_runtime_it_says_what_to_install(moe: Made, gateway: Gateway, artctl: Call) -> None:
    code, _, err = probe(artctl, "moe@2")
    assert code == 1 and "artd runtime install megatron --cpu" in err


def test_nothing_of_it_stays(
    moe: Made, gateway: Gateway, here: Path, artctl: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    assert probe(artctl, "moe@2")[0] == 0
    (here / "answer.py").write_text("sys.exit(1)")
    (here / "asked").rename(here / "before")
    assert probe(artctl, "moe@2")[0] == 1
    assert list(scratch.iterdir()) == []

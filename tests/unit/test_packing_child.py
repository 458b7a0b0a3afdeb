"""The packer's child process: what it reads, what it writes, and how it says that it cannot."""

from __future__ import annotations

import json
import math
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from safetensors.numpy import load_file

from artd.core.groups import group_outcome
from artd.packing.advantages import group_statistics
from artd.packing.batch import Bundle, PackError
from artd.packing.child import PackFailure, PackRequest, attempt, run
from artd_schema.codec import digest, to_json
from artd_schema.data.manifest import BatchManifest, ReplayManifest
from artd_schema.data.trajectory import RouteShape
from tests.unit.packing_oracle import check_batch, encode_routes, plain_sequences, source, turn

ROOT = Path(__file__).parents[2]
SHAPE = RouteShape(layers=2, topk=2, experts=5)


@pytest.fixture
def store(tmp_path):
    """A ledger of 8 trajectories, odd ids inline and even ids as blobs, and a request for them."""
    blobs = tmp_path / "blobs"
    db = tmp_path / "a b?.db"
    connection = sqlite3.connect(db)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(
        "CREATE TABLE trajectory (id INTEGER PRIMARY KEY, group_id INT, reward REAL, digest TEXT, blob TEXT)"
    )
    connection.execute("CREATE TABLE trajectory_data (trajectory_id INTEGER PRIMARY KEY, metrics BLOB, body BLOB)")
    turns_of = {}
    for number in range(1, 9):
        turns_of[number] = [turn(range(50), [1, 2, number], seed=number)]
        item = source(number, 1 + number // 5, float(number), turns_of[number])
        blob = None
        if number % 2 == 0:
            blob = item.digest
            (blobs / blob[:2]).mkdir(parents=True, exist_ok=True)
            (blobs / blob[:2] / blob).write_bytes(item.body)
        row = (number, item.group, item.reward, item.digest, blob)
        connection.execute("INSERT INTO trajectory VALUES (?, ?, ?, ?, ?)", row)
        connection.execute(
            "INSERT INTO trajectory_data VALUES (?, ?, ?)", (number, extra(number), None if blob else item.body)
        )
    connection.commit()
    request = PackRequest(
        db=str(db), blobs_dir=str(blobs), run="r", step=1, seed=0, row_length=256, scale_rewards=True,
        base_digest="b", trajectory_ids=[3, 1, 2, 4, 5, 6, 7, 8], out_dir=str(tmp_path / "out"),
    )  # fmt: skip
    yield connection, request, turns_of
    connection.close()


def extra(number):
    """What lies beside a body: the program's own metrics; one of a kind that JSON does not have."""
    return msgspec.json.encode({"metrics": {"n": number, "broken": math.inf}, "metadata": {"a": [1]}})


def put_body(connection, number, body):
    """Give a trajectory another body, in its row, with its digest."""
    connection.execute("UPDATE trajectory SET digest = ?, blob = NULL WHERE id = ?", (digest(body), number))
    connection.execute("UPDATE trajectory_data SET body = ? WHERE trajectory_id = ?", (body, number))


@pytest.fixture
def replayed(store):
    """The same, of a mixture of experts."""
    connection, request, turns_of = store
    rows = [[[p % 5, (p + 1) % 5], [(p + 3) % 5, p % 5]] for p in range(52)]
    for number, (plain,) in turns_of.items():
        routed = [msgspec.structs.replace(plain, routes=encode_routes(rows, SHAPE))]
        turns_of[number] = routed
        item = source(number, 0, 0.0, routed)
        put_body(connection, number, item.body)
    connection.commit()
    return connection, msgspec.structs.replace(request, routes=SHAPE), turns_of


def spawn(request: bytes) -> subprocess.CompletedProcess[bytes]:
    path = os.pathsep.join(str(ROOT / part) for part in (".", "schema"))
    command = [sys.executable, "-m", "artd.packing.child"]
    return subprocess.run(
        command, input=request, capture_output=True, env={**os.environ, "PYTHONPATH": path}, timeout=60
    )


def test_the_child_writes_what_it_says(store):
    _, request, turns_of = store
    done = spawn(msgspec.json.encode(request))
    assert done.returncode == 0, done
    assert done.stdout.count(b"\n") == 1
    answer = json.loads(done.stdout)
    out = Path(request.out_dir)
    for part in ("tensors", "manifest"):
        data = (out / answer[part]["name"]).read_bytes()
        assert (answer[part]["sha256"], answer[part]["bytes"]) == (digest(data), len(data))
    manifest = msgspec.json.decode((out / "manifest.json").read_bytes(), type=BatchManifest)
    assert (out / "manifest.json").read_bytes() == to_json(manifest)
    assert [t.id for t in manifest.trajectories] == request.trajectory_ids
    assert manifest.metrics["client/n"] == 4.5 and "client/broken" not in manifest.metrics
    check_batch(load_file(out / "batch.safetensors"), manifest, {n: plain_sequences(t) for n, t in turns_of.items()})


@pytest.mark.parametrize("kind", ["store", "replayed"])
def test_two_children_write_the_same_bytes(kind, request, tmp_path):
    _, wanted, _ = request.getfixturevalue(kind)
    first = run(wanted)
    again = run(msgspec.structs.replace(wanted, out_dir=str(tmp_path / "again")))
    assert first == again and (first.replay is not None) == (kind == "replayed")


def test_the_child_writes_the_replay_bundle_too(replayed):
    _, request, turns_of = replayed
    done = spawn(msgspec.json.encode(request))
    answer = json.loads(done.stdout)
    out = Path(request.out_dir)
    files = {"replay": "replay.safetensors", "replay_manifest": "replay.json"}
    for part, name in files.items():
        data = (out / name).read_bytes()
        assert answer[part] == {"name": name, "sha256": digest(data), "bytes": len(data)}
    manifest = msgspec.json.decode((out / "manifest.json").read_bytes(), type=BatchManifest)
    told = msgspec.json.decode((out / "replay.json").read_bytes(), type=ReplayManifest)
    assert manifest.replay == answer["replay_manifest"]["sha256"]
    assert (answer["covered"], answer["unshared_tokens"]) == (told.covered, 0) == (manifest.physical_tokens - 8, 0)
    bundle = Bundle(load_file(out / "replay.safetensors"), told)
    expected = {n: plain_sequences(t, SHAPE) for n, t in turns_of.items()}
    check_batch(load_file(out / "batch.safetensors"), manifest, expected, bundle)


def test_bad_routes_are_named_and_nothing_is_written(replayed):
    connection, request, turns_of = replayed
    (good,) = turns_of[5]
    bad = source(5, 2, 5.0, [msgspec.structs.replace(good, routes=good.routes[:68] + good.routes[69:70] * 140)])
    put_body(connection, 5, bad.body)
    connection.commit()
    done = spawn(msgspec.json.encode(request))
    answer = msgspec.json.decode(done.stdout, type=PackFailure)
    assert (done.returncode, answer.kind) == (1, "data")
    assert (answer.trajectory, answer.position) == (5, "turns[0].routes[17]") and "not distinct" in answer.error
    assert not Path(request.out_dir).exists()


def test_the_store_is_opened_read_only(store):
    connection, request, _ = store
    connection.execute("BEGIN IMMEDIATE")  # a writer at work must not stop the packer, nor be stopped
    assert run(request).rows == 1
    connection.execute("UPDATE trajectory SET reward = 0")
    connection.rollback()
    with pytest.raises(sqlite3.OperationalError):
        run(msgspec.structs.replace(request, db=request.db + ".missing"))
    assert not Path(request.db + ".missing").exists()


def damage_body(connection, request):
    connection.execute("UPDATE trajectory_data SET body = x'90' WHERE trajectory_id = 3")
    return 3, "", "its body in the database has sha256", "damaged"


def damage_blob(connection, request):
    (name,) = connection.execute("SELECT blob FROM trajectory WHERE id = 4").fetchone()
    path = Path(request.blobs_dir) / name[:2] / name
    path.write_bytes(path.read_bytes()[:-1])
    return 4, "", "has sha256", "damaged"


def lose_blob(connection, request):
    (name,) = connection.execute("SELECT blob FROM trajectory WHERE id = 6").fetchone()
    (Path(request.blobs_dir) / name[:2] / name).unlink()
    return 0, "", "No such file", "io"


def lose_row(connection, request):
    connection.execute("DELETE FROM trajectory WHERE id = 7")
    return 7, "", "no such row", "damaged"


def expire(connection, request):
    connection.execute("UPDATE trajectory_data SET body = NULL WHERE trajectory_id = 5")
    return 5, "", "expired", "damaged"


def not_turns(connection, request):
    put_body(connection, 1, b"\xc0")
    return 1, "body", "not a list of turns", "data"


@pytest.mark.parametrize("harm", [damage_body, damage_blob, lose_blob, lose_row, expire, not_turns])
def test_a_damaged_store_is_named(store, harm, monkeypatch):
    monkeypatch.setattr("artd.packing.child.READ_AGAIN_S", (0.0, 0.0))
    connection, request, _ = store
    number, position, text, kind = harm(connection, request)
    connection.commit()
    answer = attempt(request)
    assert isinstance(answer, PackFailure)
    assert (answer.kind, answer.trajectory, answer.position) == (kind, number, position)
    assert text in answer.error
    assert not (Path(request.out_dir) / "manifest.json").exists()


def test_a_bad_request_and_a_bad_folder_are_errors_not_traces(store):
    _, request, _ = store
    done = spawn(b'{"db": 1}')
    assert done.returncode == 1 and b"PackRequest" in done.stdout and not done.stderr
    Path(request.out_dir).write_text("a file is in the way")
    done = spawn(msgspec.json.encode(request))
    assert done.returncode == 1 and b"FileExistsError" in done.stdout and not done.stderr


def test_nothing_to_train_on_says_why(store):
    _, request, _ = store
    with pytest.raises(PackError, match="every trajectory was dropped") as caught:
        run(msgspec.structs.replace(request, row_length=10))
    assert len(caught.value.drops) == 8


def test_files_and_folder_are_synced_before_the_answer(replayed, monkeypatch):
    _, request, _ = replayed
    synced = []
    real = os.fsync
    monkeypatch.setattr(
        os, "fsync", lambda handle: (synced.append(str(Path(f"/proc/self/fd/{handle}").readlink())), real(handle))
    )
    run(request)
    names = ("batch.safetensors", "manifest.json", "replay.safetensors", "replay.json")
    assert synced == [*(f"{request.out_dir}/{name}" for name in names), request.out_dir]


@pytest.mark.parametrize(
    ("rewards", "outcome"),
    [
        ([], "empty"),
        ([1.0], "single_trajectory"),
        ([0.1, 0.1 + 5e-13], "zero_variance"),
        ([0.1, 0.1 + 2e-12], "trainable"),
        ([1.0, 1.0, 0.0], "trainable"),
    ],
)
def test_outcome_of_a_group(rewards, outcome):
    assert group_outcome(rewards) == outcome
    if rewards:
        found = group_statistics(rewards, scale=True)
        assert found.outcome == outcome and any(found.advantages) == (outcome == "trainable")


def test_advantages_do_not_depend_on_order_and_sum_to_nothing():
    rewards = [0.1 * k for k in range(9)] + [1e16, -1e16]
    found = group_statistics(rewards, scale=False)
    turned = group_statistics(rewards[::-1], scale=False)
    assert found.advantages == turned.advantages[::-1] and found.mean == 3.6 / 11
    with pytest.raises(ValueError, match="finite"):
        group_statistics([0.0, float("nan")], scale=True)

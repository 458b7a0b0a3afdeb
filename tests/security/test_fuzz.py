"""Whatever bytes arrive, a decoder answers with its own error: nothing else leaves the module."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from artd import config
from artd.backups import backup
from artd.errors import Invalid
from artd.models import base_model
from artd.net import keys
from artd.rollouts.ingest import Ingest
from artd.store.blobs import Blobs
from artd.training import commit
from artd_schema import paths
from artd_schema.codec import MAGIC, Codec, WireError, digest, to_json
from artd_schema.data.manifest import Canary, CheckpointManifest, FileEntry, WeightTable
from artd_schema.wire import client_api as api
from artd_schema.wire import worker as w
from artd_workers.engines import checkpoint
from artd_workers.engines.adapter import EngineError
from artd_workers.gateway.engine import npy
from tests.fakes.rows import add_run, open_store
from tests.gateway.conftest import engine, rig  # noqa: F401 - fixtures

FUZZ = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
CODECS = [Codec(kind) for kind in (w.FromWorker, w.ToWorker, api.Request, api.Reply)]
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=8)
VALUES = st.recursive(
    SCALARS | st.binary(max_size=16),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip
MANIFEST = to_json(
    CheckpointManifest(
        run="r", step=1, epoch=1, lineage=0, parent="a" * 64, batch="b" * 64, base_digest="c" * 64, spec_digest="",
        instance="i", job=1, fence=1, files=(FileEntry("weights.json", 2, digest(b"{}")),),
        canary=Canary(prompts=(), logprobs=(), max_abs=1e-4, mean_abs=1e-5), metrics={},
    )
)  # fmt: skip
TURN = msgspec.msgpack.encode([{"prompt_ids": b"\1\0\0\0", "token_ids": b"\2\0\0\0", "logprobs": b"\0\0\0\xbf"}])


def damaged(good: bytes) -> st.SearchStrategy[bytes]:
    """`good` with a few bytes replaced, cut out, put in, or cut off."""

    def apply(edits: list[tuple[int, int, bytes]]) -> bytes:
        data = bytearray(good)
        for place, length, new in edits:
            start = place % (len(data) + 1)
            data[start : start + length] = new
        return bytes(data)

    edit = st.tuples(st.integers(0, 10**6), st.integers(0, 8), st.binary(max_size=8))
    return st.lists(edit, min_size=1, max_size=4).map(apply)


def a_file(*, good: bytes) -> st.SearchStrategy[bytes]:
    return st.binary(max_size=64) | JSON.map(msgspec.json.encode) | damaged(good)


@contextlib.contextmanager
def folder_with(name: str, content: bytes):
    with tempfile.TemporaryDirectory(prefix="artd-fuzz.") as root:
        (Path(root) / name).write_bytes(content)
        yield Path(root)


@FUZZ
@given(frames=st.lists(st.binary(max_size=64) | VALUES.map(msgspec.msgpack.encode), max_size=4), magic=st.booleans())
@example(frames=[b"\x91" * 100_000], magic=True)
@example(frames=[b"\x82\xa4type\xa4\xff\xfe\xfd\xfc"], magic=True)
def test_the_wire(frames, magic):
    for codec in CODECS:
        with contextlib.suppress(WireError):
            codec.decode([MAGIC, *frames] if magic else frames)


@FUZZ
@given(data=st.data())
def test_the_wire_with_messages_that_were_damaged(data):
    ref = w.CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha="a" * 64, dir="/x")
    for codec, message in (
        (CODECS[0], w.Staged(job=1, fence=1, dir="/x", manifest_sha="a")),
        (CODECS[1], w.Committed(job=1, fence=1, checkpoint=ref)),
        (CODECS[2], api.Request(id=1, op=api.Submit(run="r", group="g", reward=1.0))),
        (CODECS[3], api.Reply(id=1, answer=api.Error(code="invalid", message="m"))),
    ):
        with contextlib.suppress(WireError):
            codec.decode([MAGIC, data.draw(damaged(codec.encode(message)[1]))])


@FUZZ
@given(content=a_file(good=MANIFEST))
@example(content=MANIFEST.replace(b"weights.json", b"folder"))
@example(content=MANIFEST.replace(b"weights.json", b"../../etc/passwd"))
def test_a_staged_manifest(content):
    with folder_with("manifest.json", content) as folder:
        (folder / "folder").mkdir()
        with pytest.raises(commit.BadResult):
            commit.verify(folder)


@FUZZ
@given(manifest=a_file(good=MANIFEST), table=a_file(good=to_json(WeightTable(mode="lora", tensors=()))))
def test_a_checkpoint_in_the_engine(manifest, table):
    with folder_with("manifest.json", manifest) as folder:
        (folder / "weights.json").write_bytes(table)
        ref = w.CheckpointRef(run="r", step=1, epoch=1, lineage=0, sha=digest(manifest), dir=str(folder))
        with contextlib.suppress(EngineError):
            checkpoint.read(ref)


@FUZZ
@given(content=st.binary(max_size=200) | damaged(b"\x10\0\0\0\0\0\0\0" + b'{"a":{"data_offsets":[0,4]}}' + b"\0" * 8))
@example(content=b"\x02\0\0\0\0\0\0\0[]")
@example(content=b'\x0a\0\0\0\0\0\0\0{"a": 1}  ')
@example(content=b"\xff" * 16)
def test_a_safetensors_file_in_the_engine(content):
    with folder_with("a.safetensors", content) as folder, contextlib.suppress(EngineError):
        list(checkpoint.tensor_hashes(folder / "a.safetensors"))


@FUZZ
@given(
    content=st.binary(max_size=64) | damaged(b'log_level = "info"\n[limits]\nmin_free_mib = 5\n[remote]\nbind = ""\n')
)
def test_the_settings(content):
    with folder_with("artd.toml", content) as folder, contextlib.suppress(config.ConfigError):
        config.read(folder / "artd.toml")


@FUZZ
@given(content=a_file(good=b'{"pid": 1, "ticks": 2, "boot_id": "x", "version": "1", "state": "ready"}'))
def test_daemon_json(content):
    with folder_with(paths.DAEMON_JSON, content) as folder:
        found = paths.read_daemon_file(folder)
        if found is not None:
            found.alive()


@FUZZ
@given(content=a_file(good=b'{"architectures": ["LlamaForCausalLM"], "vocab_size": 4}'))
def test_the_config_of_a_model(content):
    with folder_with("config.json", content) as folder, pytest.raises(Invalid):
        base_model.pin(str(folder))


@FUZZ
@given(content=a_file(good=b'{"version": 1}'))
def test_backup_json(content):
    with folder_with(backup.INFO, content) as folder, contextlib.suppress(backup.BackupError):
        backup.read_info(folder)


@FUZZ
@given(
    content=st.binary(max_size=64) | damaged(b'curve\n  public-key = "' + b"a" * 40 + b'"\n'), text=st.text(max_size=48)
)
def test_keys(content, text):
    with folder_with("x.key_secret", content) as folder:
        for call in (lambda: keys.read_pair(folder / "x.key_secret"), lambda: keys.Keys(folder).allow("x", text)):
            with contextlib.suppress(keys.BadKey):
                call()


@FUZZ
@given(content=st.binary(max_size=64) | damaged(npy.write(npy.Ids(1, 2, 2, 1, b"\1\2\3\4"))))
@example(content=b"\x93NUMPY\1\0" + (9000).to_bytes(2, "little") + b"[" * 9000)
def test_the_array_of_routed_experts(content):
    with contextlib.suppress(ValueError):
        npy.read(content)


@FUZZ
@given(body=st.binary(max_size=64) | VALUES.map(msgspec.msgpack.encode) | damaged(TURN))
@example(body=b"\x91\x81\xaaprompt_ids\xa2\xff\xfe")
def test_the_body_of_a_trajectory(body):
    ingest, op = _ingest(), api.Submit(run="r", group="g", reward=1.0)
    with contextlib.suppress(Invalid):
        ingest(op, body)


@functools.cache
def _ingest() -> Callable[[api.Submit, bytes], object]:
    """What `Ingest` does with a body before any row."""

    async def make() -> Callable[[api.Submit, bytes], object]:
        with tempfile.TemporaryDirectory(prefix="artd-fuzz.") as root:
            async with open_store(Path(root)) as store:
                await add_run(store)
                made = Ingest(store, Blobs(Path(root) / "blobs"), 1 << 16)
                facts = await made.facts("r")
                return lambda op, body: made._check(op, facts, body)

    return asyncio.run(make())


BODIES = (
    b"", b"\xff\xfe", b"null", b"[]", b"{", b"[" * 100_000, b'{"model": 1}', b'{"model": "pol", "messages": "x"}',
    b'{"model": "pol", "messages": [1]}', b'{"model": "pol", "messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"model": "pol", "messages": [{"role": "user", "content": "x"}], "n": -1}',
    b'{"model": "pol", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
    b'{"model": "pol", "messages": [{"role": "user", "content": "x"}], "max_tokens": 1e99}',
    b'{"model": "pol", "messages": [{"role": "user", "content": "x"}], "prompt_token_ids": [[1], "a"]}',
    b'{"model": "\xed\xa0\x80", "messages": []}', b'{"model": "pol", "prompt": {"a": 1}}', b'{"model": "pol", "prompt": [-1]}',
)  # fmt: skip


@pytest.mark.asyncio
async def test_http(rig, engine):  # noqa: F811
    good = b'{"model": "pol", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 1, "seed": 7}'
    dice = random.Random(7)
    cut = [good[: dice.randrange(len(good))] + dice.randbytes(4) + good[dice.randrange(len(good)) :] for _ in range(60)]
    for path in ("/v1/chat/completions", "/v1/completions"):
        for body in (*BODIES, *cut):
            answer = await rig.http.post(path, content=body)
            # 502: the engine failed at it (the fake one validates nothing), and the gateway says so.
            assert answer.status_code in (200, 400, 404, 413, 422, 502), (path, body, answer.text)
            assert answer.status_code == 200 or answer.json()["error"]["message"], (path, body, answer.text)
    assert (await rig.chat()).status_code == 200

"""Values at ingest: whatever is stored is stored as it was sent, and whatever cannot be packed is refused by its name."""

from __future__ import annotations

import json
import math

import msgspec
import pytest
import pytest_asyncio

from artd.check.run import check
from artd.errors import Invalid
from artd.retention.collector import Collector, Retention
from artd.store.blobs import GRACE_S, Blobs
from artd_schema.codec import Codec, WireError
from artd_schema.data.trajectory import ExchangeRef, Sampling, Turn, untrainable
from artd_schema.wire import client_api as api
from tests.fakes.rows import FakeClock, add_run, body, count, data_dir, make_ingest, one, open_store, submit, turn

pytestmark = pytest.mark.asyncio
WIRE = Codec[api.Request](api.Request)
INF, NAN = math.inf, math.nan


@pytest_asyncio.fixture(name="place")
async def a_place(tmp_path):
    async with open_store(tmp_path, FakeClock()) as store:
        await add_run(store)
        yield store, make_ingest(store, data_dir(tmp_path))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"reward": 1e200}, "reward"),
        ({"reward": -1.1e30}, "reward"),
        ({"reward": NAN}, "reward"),
        ({"reward": INF}, "reward"),
        ({"metrics": {"good": 1.0, "bad": INF}}, "metrics['bad']"),
        ({"metrics": {"bad": NAN}}, "metrics['bad']"),
        ({"metrics": {str(number): 0.0 for number in range(257)}}, "metrics"),
        ({"metrics": {"x" * 257: 0.0}}, "metrics"),
        ({"metadata": {"a": [1, {"b": NAN}]}}, "metadata['a'][1]['b']"),
        ({"metadata": {"a": None, "b": -INF}}, "metadata['b']"),
        ({"metadata": {"a": {1: 2}}}, "metadata"),
    ],
)
@pytest.mark.parametrize("refs", [(), (ExchangeRef("x"),)], ids=["by value", "by reference"])
async def test_a_value_that_cannot_be_kept_is_refused_by_its_name(place, changes, field, refs):
    store, ingest = place
    op = api.Submit(**({"run": "r", "group": "g", "reward": 1.0, "refs": refs} | changes))
    with pytest.raises(Invalid) as refused:
        await ingest.submit(op, [] if refs else [body()])
    assert refused.value.field == field and field in refused.value.message
    assert await count(store, "trajectory") == 0


@pytest.mark.parametrize("heat", [1e-60, 1e-38, 0.0099, 100.1, 1e30, 1e300, INF])
async def test_a_temperature_that_no_trainer_scores_is_refused_everywhere(place, heat):
    _, ingest = place
    with pytest.raises(Invalid, match=r"turns\[0\].sampling.temperature: .* from 0.01 to 100"):
        await submit(ingest, turns=[turn(sampling=Sampling(temperature=heat))])
    assert [one.name for one in untrainable(Sampling(temperature=heat))] == [
        "temperature"
    ]  # what gateway and packer ask


@pytest.mark.parametrize("heat", [-1.0, NAN])
async def test_a_temperature_that_is_none_is_named(place, heat):
    _, ingest = place
    with pytest.raises(Invalid) as refused:
        await submit(ingest, turns=[turn(), turn(sampling=Sampling(temperature=heat))])
    assert refused.value.message == "turns[1].sampling.temperature: Expected `float` >= 0.0"
    assert refused.value.field == "turns[1].sampling.temperature"


@pytest.mark.parametrize("epoch", [2**31, -1])
@pytest.mark.parametrize("column", ["policy_epoch", "kv_cache_epoch"])
async def test_an_epoch_that_a_batch_cannot_hold_is_refused(place, epoch, column):
    _, ingest = place
    with pytest.raises(Invalid, match=rf"turns\[0\].{column}: policy epoch {epoch} is not a number from 0 to"):
        await submit(ingest, turns=[turn(**{column: ((0, epoch),)})])


@pytest.mark.parametrize(
    "op",
    [
        api.Submit(run="r", group="g", reward=0.0, refs=(ExchangeRef("x", 2**63),)),
        api.Submit(run="r", group="g", reward=0.0, refs=tuple(ExchangeRef(str(n)) for n in range(4097))),
        api.Pause(run="r", reason="x" * 1001),
    ],
)
async def test_what_sqlite_or_a_status_cannot_hold_is_refused_before_it_is_asked(op):
    with pytest.raises(WireError, match=r"\$\.op\."):
        WIRE.decode(WIRE.encode(api.Request(id=1, op=op)))


async def test_large_metadata_lies_in_a_file_until_the_body_expires(tmp_path):
    clock, data = FakeClock(), data_dir(tmp_path)
    small, large = {"a": "x" * 60_000}, {"a": "y" * 70_000}
    async with open_store(tmp_path, clock) as store:
        await add_run(store)
        ingest = make_ingest(store, data)
        blobs = Blobs(data.blobs, clock.monotonic)
        for key, metadata, reward in (("s", small, 0.0), ("l", large, 1.0)):
            done = await submit(ingest, key=key, metadata=metadata, reward=reward, metrics={"m": 1.0})
            assert not done.duplicate
            assert (await submit(ingest, key=key, metadata=metadata, reward=reward, metrics={"m": 1.0})).duplicate
        # The fast way gives it to the slow one.
        answers = []
        assert not ingest.submit_now(
            api.Submit(run="r", group="h", reward=0.0, metadata=large), [body()], answers.append
        )
        rows = await store.read("SELECT d.metrics, d.metadata FROM trajectory_data d ORDER BY trajectory_id")
        assert (
            json.loads(rows[0]["metrics"]) == {"metrics": {"m": 1.0}, "metadata": small} and rows[0]["metadata"] is None
        )
        assert json.loads(rows[1]["metrics"]) == {"metrics": {"m": 1.0}, "metadata": None}
        sha = rows[1]["metadata"]
        assert msgspec.json.decode(blobs.path(sha).read_bytes()) == large
        assert await one(store, "SELECT kind FROM blob WHERE sha = ?", sha) == "metadata"
        assert [row.name for row in check(data.root, deep=True).broken] == ["meta.instance"]
        # It is nobody's garbage while its trajectory may be trained, and goes with the body.
        clock.advance(GRACE_S + 1)
        collector = Collector(store, blobs, Retention(trajectories_days=1.0))
        await collector.collect()
        assert blobs.path(sha).exists()
        await store.write(lambda c: c.execute("UPDATE trajectory SET state = 'discarded'"))
        await store.write(lambda c: c.execute("UPDATE trajectory_group SET state = 'discarded'"))
        clock.advance(3 * 86_400.0)
        await collector.collect()
        assert not blobs.path(sha).exists() and await count(store, "blob") == 0
        assert await count(store, "trajectory_data", "metadata IS NOT NULL") == 0


async def test_every_integer_of_a_turn_is_bounded_where_it_is_used(place):
    """Those of other fields go nowhere: they are stored as they are."""
    store, ingest = place
    odd = Turn(prompt_ids=turn().prompt_ids, token_ids=turn().token_ids, logprobs=turn().logprobs, num_evictions=2**63, choice=2**63,
               routes_start=2**63, sampling=Sampling(seed=2**63, max_tokens=2**63))  # fmt: skip
    await submit(ingest, turns=[odd])
    assert await count(store, "trajectory") == 1

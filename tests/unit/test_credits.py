"""What a program gives for each token, and examples: stored with the turn, packed where the token lies, refused where the run has no use for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from artd.errors import Invalid
from artd.packing.batch import PackSpec, pack
from artd.packing.inputs import Source
from artd_client.errors import Invalid as Refused
from artd_client.turns import Given as Numbers
from artd_client.turns import make_credits
from artd_schema.codec import digest
from artd_schema.data.trajectory import Credit, Given, Turn
from artd_schema.run.spec import AdvantageSpec, LossSpec
from artd_schema.wire import client_api as api
from tests.fakes.rows import (
    WHOLE,
    add_run,
    body,
    by_reference,
    data_dir,
    exchange,
    floats,
    ids,
    make_ingest,
    one,
    open_store,
    refused,
    submit,
    turn,
)

GIVEN = AdvantageSpec(baseline="given")


async def stored(store: Any) -> list[Turn]:
    (row,) = await store.read(WHOLE)
    assert digest(row["body"]) == row["digest"]
    return msgspec.msgpack.decode(row["body"], type=list[Turn])


@pytest.mark.asyncio
@pytest.mark.parametrize("referring", [True, False])
async def test_they_are_stored_with_each_turn(tmp_path: Any, referring: bool) -> None:
    credits = (Credit(advantages=(2.0,), weights=(0.5, 0.0)), Credit(advantages=(1.0, -3.0)))
    async with open_store(tmp_path) as store:
        await add_run(store, advantages=GIVEN)
        ingest = make_ingest(store, data_dir(tmp_path))
        if referring:
            for name in ("one", "two"):
                await exchange(ingest, name)
            op = by_reference(("one", 0), ("two", 0))
            send = lambda c: ingest.submit(msgspec.structs.replace(op, credits=c), [])  # noqa: E731
        else:
            op = api.Submit(run="r", group="g", reward=0.0, key="k")
            send = lambda c: ingest.submit(msgspec.structs.replace(op, credits=c), [body(turn(), turn())])  # noqa: E731
        await refused(Invalid, "credits", "1 for 2 turns", send(credits[:1]))
        await refused(Invalid, "turns[0].advantages", "give advantages", send(()))
        bad = (Credit(advantages=(1.0, 2.0, 3.0)), credits[1])
        await refused(Invalid, "credits[0].advantages", "3 values for 2 sampled tokens", send(bad))
        worse = (Credit(advantages=(1.0,), weights=(-1.0,)), credits[1])
        await refused(Invalid, "turns[0].weights[0]", "-1.0 is not a finite number of at least 0", send(worse))
        await send(credits)
        first, second = await stored(store)
        assert (first.advantages, first.weights) == (floats(2.0, 2.0), floats(0.5, 0.0))
        assert (second.advantages, second.weights) == (floats(1.0, -3.0), b"")


@pytest.mark.asyncio
async def test_a_run_takes_what_it_trains(tmp_path: Any) -> None:
    async with open_store(tmp_path) as store:
        await add_run(store)
        ingest = make_ingest(store, data_dir(tmp_path))
        given = submit(ingest, key="a", credits=(Credit(advantages=(1.0,)),))
        await refused(Invalid, "turns[0].advantages", "makes advantages from rewards", given)
        example = turn(logprobs=floats(0.0, 0.0), given=Given(example=True))
        await refused(Invalid, "turns", "not on examples", submit(ingest, key="b", turns=(example,)))
        await submit(ingest, key="c", credits=(Credit(weights=(0.25,)),))


@pytest.mark.asyncio
async def test_a_run_of_examples(tmp_path: Any) -> None:
    """Each is a group of one that seals at once; a rollout is refused."""
    async with open_store(tmp_path) as store:
        await add_run(store, loss=LossSpec(kind="sft"), group_size=1)
        ingest = make_ingest(store, data_dir(tmp_path))
        await refused(Invalid, "turns", "use run.submit_example", submit(ingest, key="a"))
        example = turn(logprobs=floats(0.0, 0.0), given=Given(example=True))
        answer = await submit(ingest, "x", 0.0, "b", turns=(example,))
        assert answer.group_state == "sealed"
        assert await one(store, "SELECT state FROM trajectory_group") == "sealed"


def source(number: int, group: int, turns: Sequence[Turn], reward: float = 0.0) -> Source:
    encoded = msgspec.msgpack.encode(list(turns))
    return Source(number, group, reward, digest(encoded), encoded)


def test_each_token_has_its_own_where_it_lies() -> None:
    """Two turns of one sequence, the first with an untrained token, beside a trajectory of another group."""
    first = turn(
        prompt_ids=ids(1, 2), token_ids=ids(3, 4), given=Given(advantages=floats(0.5, -2.0), weights=floats(0.0, 3.0))
    )
    second = turn(prompt_ids=ids(1, 2, 3, 4, 9), token_ids=ids(5, 6), given=Given(advantages=floats(1.0, 7.0)))
    other = turn(
        prompt_ids=ids(8, 8), token_ids=ids(7, 5), given=Given(advantages=floats(-1.0, -1.0), weights=floats(2.0, 0.5))
    )
    spec = PackSpec(run="r", step=1, seed=0, row_length=32, scale_rewards=False, base_digest="b", advantages=GIVEN)
    tensors, manifest, _ = pack(spec, [source(1, 1, [first, second]), source(2, 2, [other])])
    assert not manifest.drops and manifest.trainable_tokens == 5
    trained = tensors["loss_mask"] == 1
    columns = zip(*(tensors[name][trained].tolist() for name in ("tokens", "advantages", "weights")), strict=True)
    assert sorted(columns) == [(4, -2.0, 3.0), (5, -1.0, 0.5), (5, 1.0, 1.0), (6, 7.0, 1.0), (7, -1.0, 2.0)]
    untrained = ~trained
    assert not tensors["advantages"][untrained].any() and not tensors["weights"][untrained].any()


def test_weights_go_with_advantages_of_rewards() -> None:
    turns = [turn(given=Given(weights=floats(0.5, 2.0))), turn()]
    spec = PackSpec(run="r", step=1, seed=0, row_length=32, scale_rewards=False, base_digest="b")
    tensors, _, _ = pack(spec, [source(n, 1, [one], float(n)) for n, one in enumerate(turns)])
    trained = tensors["loss_mask"] == 1
    pairs = zip(tensors["advantages"][trained].tolist(), tensors["weights"][trained].tolist(), strict=True)
    assert sorted(pairs) == [(-0.5, 0.5), (-0.5, 2.0), (0.5, 1.0), (0.5, 1.0)]
    assert np.isfinite(tensors["weights"]).all()


@pytest.mark.parametrize(
    ("given", "wanted"),
    [(None, ((), ())), (2, ((2.0,), (2.0,))), ([1, [2, 3]], ((1.0,), (2.0, 3.0)))],
)
def test_a_program_gives_one_number_or_a_part_for_each_turn(given: Numbers, wanted: tuple[Any, ...]) -> None:
    assert tuple(c.advantages for c in make_credits(given, 1.0, 2)) == wanted
    assert make_credits(None, None, 2) == ()
    with pytest.raises(Refused, match="1 parts for 2 turns"):
        make_credits([1.0], None, 2)


def test_a_turn_without_them_keeps_its_bytes() -> None:
    """A header of more than 15 fields would be another one, and so would every digest of a body."""
    assert len(msgspec.structs.fields(Turn)) <= 15 and msgspec.msgpack.encode(turn())[0] == 0x83

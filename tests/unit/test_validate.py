"""core.validate: every rule of a trajectory's turns, with the path of the bad field."""

from __future__ import annotations

import pytest

from artd.core.fields import InvalidField
from artd.core.validate import check_turns
from artd.packing.routes import AssemblyError
from artd.packing.sequences import assemble
from artd_schema.data.rules import epoch_range
from artd_schema.data.trajectory import Sampling
from artd_workers.engines.vllm.dialect import DIALECT
from artd_workers.gateway.errors import ApiError, EngineFailure
from artd_workers.gateway.request.turns import build_turn, refuse_untrainable
from tests.fakes.rows import VOCAB, floats, ids, turn

NAN, INF = float("nan"), float("inf")

BAD = {
    "turns[1].prompt_ids": ({"prompt_ids": b""}, "is empty"),
    "turns[1].prompt_ids ": ({"prompt_ids": b"\0\0\0"}, "3 bytes, not a whole number of int32"),
    "turns[1].token_ids": ({"token_ids": b"\0" * 5}, "5 bytes"),
    "turns[1].prompt_ids[1]": ({"prompt_ids": ids(1, VOCAB)}, f"token id {VOCAB} is outside the vocabulary of {VOCAB}"),
    "turns[1].token_ids[0]": ({"token_ids": ids(-1, 3)}, "token id -1"),
    "turns[1].logprobs": ({"logprobs": floats(-1.0)}, "1 values for 2 token ids"),
    "turns[1].logprobs ": ({"logprobs": floats(-1.0, -1.0, -1.0)}, "3 values for 2"),
    "turns[1].logprobs  ": ({"logprobs": floats(-1.0, -1.0) + b"\0"}, "for 2 token ids"),
    "turns[1].logprobs[1]": ({"logprobs": floats(-1.0, NAN)}, "nan is not a finite"),
    "turns[1].logprobs[0]": ({"logprobs": floats(0.5, -1.0)}, "0.5 is not a finite number <= 0"),
    "turns[1].logprobs[0] ": ({"logprobs": floats(-INF, -1.0)}, "-inf"),
    "turns[1].logprobs[1] ": ({"logprobs": floats(-1.0, INF)}, "inf"),
    "turns[1].policy_epoch": ({"policy_epoch": ((1, 0),)}, "must start at token 0"),
    "turns[1].policy_epoch ": ({"policy_epoch": ((0, 1), (1, 0))}, "epochs that never fall"),
    "turns[1].policy_epoch  ": ({"policy_epoch": ((0, 0), (0, 1))}, "rising starts"),
    "turns[1].policy_epoch   ": ({"policy_epoch": ((0, 0), (2, 1))}, "starts at token 2 of 2"),
    "turns[1].kv_cache_epoch": ({"kv_cache_epoch": ((3, 0),)}, "must start at token 0"),
    "turns[1].sampling.temperature": ({"sampling": Sampling(temperature=0.0)}, "greedy"),
    "turns[1].sampling.top_p": ({"sampling": Sampling(top_p=0.9)}, "truncates"),
    "turns[1].sampling.top_k": ({"sampling": Sampling(top_k=50)}, "truncates"),
    "turns[1].sampling.min_p": ({"sampling": Sampling(min_p=0.1)}, "truncates"),
    "turns[1].sampling.presence_penalty": ({"sampling": Sampling(presence_penalty=0.1)}, "reshapes"),
    "turns[1].sampling.frequency_penalty": ({"sampling": Sampling(frequency_penalty=0.1)}, "reshapes"),
    "turns[1].sampling.repetition_penalty": ({"sampling": Sampling(repetition_penalty=1.1)}, "reshapes"),
}


@pytest.mark.parametrize("path", BAD)
def test_a_bad_field_is_named(path):
    changes, text = BAD[path]
    with pytest.raises(InvalidField) as caught:
        check_turns([turn(), turn(**changes)], VOCAB, True)
    assert caught.value.field == path.strip() and text in str(caught.value)
    assert str(caught.value).startswith(path.strip())


@pytest.mark.parametrize("path", [path for path in BAD if "token id " not in BAD[path][1]])
def test_the_packer_tells_what_ingest_tells(path):
    changes, text = BAD[path]
    with pytest.raises(AssemblyError) as caught:
        assemble([turn(), turn(**changes)])
    assert caught.value.where == path.strip() and text in caught.value.what


def test_the_gateway_tells_what_ingest_tells():
    choice = {"token_ids": [5], "logprobs": {"content": [{"token_id": 5, "logprob": NAN}]}}
    more = {
        "sampling": Sampling(),
        "epochs": (),
        "cache": (),
        "capture": None,
        "response_id": "",
        "index": 0,
        "raw": {},
    }
    with pytest.raises(EngineFailure, match=r"logprobs\[0\]: logprob nan is not a finite number <= 0"):
        build_turn("e", DIALECT, [1], choice, **more)
    with pytest.raises(EngineFailure, match="prompt_ids: is empty"):
        build_turn("e", DIALECT, [], {"token_ids": []}, **more)


def test_no_turns():
    with pytest.raises(InvalidField) as caught:
        check_turns([], VOCAB, True)
    assert caught.value.field == "turns"


def test_sampled_tokens_are_counted():
    assert check_turns([turn(), turn(token_ids=ids(1), logprobs=floats(0.0))], VOCAB, True) == 3
    assert check_turns([turn(token_ids=b"", logprobs=b"")], VOCAB, True) == 0


def test_the_edges_of_what_is_right():
    edges = turn(
        prompt_ids=ids(0), token_ids=ids(VOCAB - 1, 0), logprobs=floats(0.0, -1e30), policy_epoch=((0, 3), (1, 3))
    )
    assert check_turns([edges], VOCAB, True) == 2
    assert check_turns([turn(sampling=Sampling(top_k=-1, max_tokens=5, seed=1, stop=("x",)))], VOCAB, True) == 2


def test_very_negative_logprobs_do_not_sum_to_an_error():
    many = 100
    good = turn(token_ids=ids(*[1] * many), logprobs=floats(*[-3e38] * many))
    assert check_turns([good], VOCAB, True) == many


UNTRAINABLE = {
    "temperature": 0.0, "top_p": 0.9, "top_k": 50, "min_p": 0.1, "presence_penalty": 0.1, "frequency_penalty": 0.1,
    "repetition_penalty": 1.1,
}  # fmt: skip


@pytest.mark.parametrize("name", UNTRAINABLE)
def test_gateway_ingest_and_packer_refuse_the_same_sampling(name):
    params = {name: UNTRAINABLE[name]}
    bad = turn(sampling=DIALECT.sampling(params))
    with pytest.raises(InvalidField) as submitted:
        check_turns([bad], VOCAB, True)
    with pytest.raises(AssemblyError) as packed:
        assemble([bad])
    assert submitted.value.field == packed.value.where == f"turns[0].sampling.{name}"
    refused = ""
    try:
        refuse_untrainable(DIALECT, params, bad.sampling, params)
    except ApiError as asked:
        refused = asked.param
    assert refused == (name if name != "temperature" else ""), "greedy: it may be an evaluation"


def test_gateway_ingest_and_packer_take_the_same_sampling():
    params = {"temperature": 0.7, "top_p": 1, "top_k": -1, "max_tokens": 5, "seed": 1, "stop": ["x"]}
    good = turn(sampling=DIALECT.sampling(params))
    refuse_untrainable(DIALECT, params, good.sampling, params)
    assert check_turns([good], VOCAB, True) == 2 and len(assemble([good])) == 1
    told = UNTRAINABLE.keys() | {"max_tokens", "seed", "stop"}
    assert told == set(Sampling.__struct_fields__), "a new parameter can be trained on or cannot"


def test_eval_may_be_sampled_in_any_way():
    assert check_turns([turn(sampling=Sampling(temperature=0.0, top_p=0.5))], VOCAB, False) == 2


def test_epochs_must_be_known_where_the_daemon_knows_them():
    stamped = turn(policy_epoch=((0, 4), (1, 5)))
    assert check_turns([stamped], VOCAB, True) == 2
    assert check_turns([stamped], VOCAB, True, next_epoch=6) == 2
    with pytest.raises(InvalidField, match="policy epoch 5 was never served") as caught:
        check_turns([stamped], VOCAB, True, next_epoch=5)
    assert caught.value.field == "turns[0].policy_epoch"
    for field in ("policy_epoch", "kv_cache_epoch"):
        with pytest.raises(InvalidField, match="never served"):
            check_turns([turn(**{field: ((0, -1),)})], VOCAB, True, next_epoch=5)
    with pytest.raises(InvalidField, match="epoch 7 was never served"):
        check_turns([turn(kv_cache_epoch=((0, 7), (1, 4)))], VOCAB, True, next_epoch=5)


def test_behind_what_was_computed_again_the_epoch_of_the_cache_falls():
    assert check_turns([turn(policy_epoch=((0, 4), (1, 5)), kv_cache_epoch=((0, 5), (1, 4)))], VOCAB, True) == 2


def test_epoch_range():
    assert epoch_range([turn()]) == (None, None)
    assert epoch_range([turn(policy_epoch=((0, 2), (1, 4))), turn(policy_epoch=((0, 3),))]) == (2, 4)

"""What a wrong call is told: what was wrong, by its name, and what to do instead."""

from __future__ import annotations

import pytest

from artd.errors import Conflict, Invalid, RequestError
from artd.runs.lifecycle import Runs
from artd_client import run as client_run
from artd_client.errors import Invalid as ClientInvalid
from artd_client.specs import make_spec
from artd_schema.run.spec import RunSpec
from artd_schema.wire import client_api as api
from artd_workers.gateway.errors import ApiError
from artd_workers.gateway.request.sense import refuse_senseless
from tests.fakes.rows import EVERY_STEP, add_run, data_dir, make_ingest, open_store, submit, turn


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"lr": 1e-4}, 'give optimizer={"lr": ...}'),
        ({"learning_rate": 1e-4}, 'give optimizer={"lr": ...}'),
        ({"rank": 8}, 'give lora={"rank": ...}'),
        ({"max_model_len": 8}, 'give engine={"max_model_len": ...}'),
        ({"temperature": 1.0}, "it belongs to each request"),
        ({"kl_coef": 0.1}, "no KL term"),
        ({"lora": True}, "give a dict such as {'rank': 16}"),
        ({"parameters": "all"}, "it is one of 'full', 'lora'"),
        ({"group_sise": 2}, "did you mean group_size?"),
    ],
)
def test_a_spec_with_a_wrong_field_says_where_it_belongs(fields, says):
    with pytest.raises(ClientInvalid) as refused:
        make_spec("/m", None, fields)
    assert says in refused.value.message and "\n" not in refused.value.message


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"reward": "abc"}, "reward", "reward: 'abc' is not a number"),
        ({"reward": None}, "reward", "reward: None is not a number"),
        ({"metrics": {"x": "y"}}, "metrics['x']", "metrics['x']: 'y' is not a number"),
        ({"metrics": {"x": None}}, "metrics['x']", "is not a number"),
        ({"group": "\ud800"}, "group", "cannot be written as UTF-8"),
        ({"split": "valid"}, "split", "use one of: 'train', 'eval'"),
    ],
)
async def test_a_submit_with_a_wrong_value_names_it(changes, field, says):
    with pytest.raises(ClientInvalid) as refused:
        await client_run.Run.submit(
            client_run.Run(None, api.RunInfo(name="r", state="active", reason="", spec=None, step=0, served=0, created=False,
                                           base_url="", api_key=""), None, None),
            **({"group": "g", "reward": 1.0, "turns": [turn()]} | changes),
        )  # fmt: skip
    assert refused.value.field == field and says in refused.value.message


@pytest.mark.asyncio
async def test_a_conflict_of_keys_names_group_and_reward(tmp_path):
    async with open_store(tmp_path) as store:
        await add_run(store, group_size=9)
        ingest = make_ingest(store, data_dir(tmp_path))
        await submit(ingest, group="ga", reward=1.0, key="k")
        with pytest.raises(
            Conflict, match=r"other content: it was submitted to group 'ga' with reward 1, split 'train'"
        ):
            await submit(ingest, group="gb", reward=0.0, key="k")


@pytest.mark.asyncio
async def test_a_model_that_is_not_there_is_told_before_a_runtime_that_is_not_installed(tmp_path):
    def missing(_kind: str):
        raise RequestError("runtime megatron (cpu) is not installed")

    async with open_store(tmp_path) as store:
        with pytest.raises(Invalid, match="there is no model folder"):
            await Runs(store, missing, EVERY_STEP).create(api.CreateRun(name="r", spec=RunSpec(model="/not/there")))


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"max_tokens": 0}, "max_tokens=0: an answer has at least 1 token"),
        ({"max_completion_tokens": -1}, "max_completion_tokens=-1"),
        ({"prompt": [504, -1]}, "prompt[1]: -1 is no token id"),
        ({"prompt": [[1], [2, -3]]}, "prompt[1][1]: -3 is no token id"),
    ],
)
def test_a_request_without_sense_is_refused_in_one_line(body, says):
    with pytest.raises(ApiError) as refused:
        refuse_senseless(body)
    assert refused.value.status == 400 and says in str(refused.value)
    refuse_senseless({"max_tokens": 1, "prompt": "text", "messages": []})

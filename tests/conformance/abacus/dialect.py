"""The gateway's dialect of the abacus. Nothing in it has vLLM's form. `gateway_engine.py` is the engine's side."""

from __future__ import annotations

import base64
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from artd_schema.data.trajectory import Sampling
from artd_workers.gateway.dialect import Client, Dialect, Json, Origin, Piece, Scored, Span, Taken
from artd_workers.gateway.engine.npy import Ids
from artd_workers.gateway.errors import EngineFailure
from artd_workers.gateway.request.kinds import Kind

from .entry import ABACUS


class AbacusDialect:
    """See `gateway.dialect.Dialect`."""

    fields = frozenset(("bad_words", "top_k"))
    grammar: Sequence[str] = ("beads_on",)
    floor = ABACUS.floor
    reshaping: Sequence[str] = ("bad_words",)
    overflow: Mapping[str, str] = MappingProxyType({"maximum context length": "no more beads: "})
    hints: Mapping[int, str] = MappingProxyType({500: " (is it upright?)"})

    async def render(self, client: Client, kind: Kind, body: Json) -> list[Json]:
        told = await client.post("/abacus/tokens", {"model": body["model"], "chat": kind.chat, "body": body})
        try:
            return [{"token_ids": one["ids"], "sampling_params": one["draw"]} for one in told["prompts"]]
        except (KeyError, TypeError) as error:
            raise EngineFailure(client.name, f"its tokens have another form: {error!r}") from None

    def sampling(self, params: Json) -> Sampling:
        known = {name: params[name] for name in Sampling.__struct_fields__ if params.get(name) is not None}
        return msgspec.convert(known, Sampling)

    def to_generate(self, request: Json, *, model: str, request_id: str, salt: str) -> Json:
        return request | {"model": model, "request_id": request_id, "salt": salt}

    async def generate(self, client: Client, request: Json) -> Any:
        body = {"model": request["model"], "name": request["request_id"], "salt": request["salt"],
                "ids": request["token_ids"], "draw": request["sampling_params"]}  # fmt: skip
        told = await client.post("/abacus/draw", body, unbounded=True)
        return {"choices": [self._choice(one) for one in told["beads"]]}

    def _choice(self, one: Json) -> Json:
        return {"index": one.pop("at"), "token_ids": one.pop("ids"), "finish_reason": one.pop("why"), "bead": one}

    async def stream(
        self, client: Client, kind: Kind, body: Json, request: Json, *, logprobs: bool
    ) -> AsyncGenerator[Piece, None]:
        asked = {"model": request["model"], "name": request["request_id"], "salt": request["salt"], "ids": request["token_ids"],
                 "draw": request["sampling_params"], "body": body, "scores": logprobs}  # fmt: skip
        async for data in client.events("/abacus/watch", asked):
            told = msgspec.json.decode(data)
            if "fault" in told:
                raise client.error("/abacus/watch", told["status"], told["fault"])
            said = {"content": told.pop("said"), "logprobs": told.pop("spelt")}
            choice = self._choice(told)
            yield Piece(choice["index"], choice, {name: value for name, value in said.items() if value})

    def join(self, fragments: Sequence[Json]) -> Json:
        ids = [token for one in fragments for token in one["token_ids"]]
        scores = [score for one in fragments for score in one["bead"]["scores"]]
        return fragments[-1] | {"token_ids": ids, "bead": fragments[-1]["bead"] | {"scores": scores}}

    async def derender(
        self, client: Client, kind: Kind, body: Json, requests: Sequence[Json], replies: Sequence[Json],
        *, response_id: str, logprobs: bool,
    ) -> Any:  # fmt: skip
        drawn = [[[one["token_ids"], one["finish_reason"]] for one in reply["choices"]] for reply in replies]
        return await client.post(
            "/abacus/text",
            {"model": body["model"], "chat": kind.chat, "name": response_id, "body": body, "drawn": drawn},
        )

    def cut_text(self, text: str, choice: Json, params: Json) -> str:
        return text.partition(choice["bead"]["hit"])[0] if self.ended_by_text(choice) else text

    def ended_by_text(self, choice: Json) -> bool:
        return bool(choice["bead"]["hit"])

    def logprobs(self, choice: Json) -> list[Scored]:
        return [(scores[0][0], scores[0][1]) for scores in choice["bead"]["scores"]]

    def alternatives(self, choice: Json) -> list[list[Scored]]:
        return [[(token, value) for token, value in scores] for scores in choice["bead"]["scores"]]

    def spans(self, choice: Json) -> list[Span]:
        return [Span(label, start, end) for start, end, label in choice["bead"]["weights"]]

    async def trace(self, client: Client, keys: Sequence[str]) -> dict[str, Origin]:
        told = await client.post("/abacus/who", {"keys": list(keys)}, unbounded=True)
        return {key: msgspec.convert({"policy": drew, "cache": kept}, Origin) for key, (drew, kept) in told.items()}

    def take_field(self, choice: Json) -> Any:
        return choice["bead"].pop("rods", None)

    def field_start(self, request: Json) -> int:
        return 0

    def read_field(self, field: Any) -> Ids:
        layers, topk, data = field
        content = base64.b64decode(data)
        return Ids(len(content) // (layers * topk), layers, topk, 1, content)

    async def take_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> dict[str, Taken]:
        told = await client.post("/abacus/rods", {"names": list(ids)})
        return {key: Taken(base64.b64decode(data), start, rows) for key, (data, start, rows) in told.items()}

    async def drop_experts(self, client: Client, ids: Sequence[str], timeout_s: float) -> None:
        await client.post("/abacus/forget", {"names": list(ids)})


DIALECT: Dialect = AbacusDialect()

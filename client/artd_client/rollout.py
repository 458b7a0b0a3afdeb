"""Rollouts by name, and groups of them: a program needs a base URL, and no response ids."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from artd_schema.data.trajectory import Split
from artd_schema.wire import client_api as api
from artd_schema.wire.rollout_names import HEADERS, ROOT, name_fault

from .errors import Invalid, NotFound
from .turns import Given

if TYPE_CHECKING:
    from openai import AsyncOpenAI

log = logging.getLogger(__name__)
MOST = 4096
"""The most rollouts of a group."""


class _Home(Protocol):
    """What a rollout needs of its run."""

    @property
    def name(self) -> str:
        """See `Run.name`."""

    @property
    def model(self) -> str:
        """See `Run.model`."""

    @property
    def base_url(self) -> str:
        """See `Run.base_url`."""

    @property
    def api_key(self) -> str:
        """See `Run.api_key`."""

    def openai(self, **options: Any) -> AsyncOpenAI:
        """See `Run.openai`."""

    async def seal(self, group: str) -> api.GroupInfo:
        """See `Run.seal`."""

    async def discard_group(self, group: str) -> None:
        """See `Run.discard_group`."""

    async def submit(
        self, group: str, reward: float, *, rollout: str, key: str | None, split: Split, metrics: Mapping[str, float] | None,
        metadata: dict[str, Any] | None, advantages: Given, weights: Given,
    ) -> api.Submitted:  # fmt: skip
        """See `Run.submit`."""


class Rollout:
    """One rollout by name; `Run.rollout` and `Run.group` make it.

    Every request below `root_url`, or with `headers`, belongs to it in the order in which the requests were sent, those of sub-agents
    too. A request that is repeated because its reply was lost gets the stored reply; an answer that its client never had is superseded,
    and never trained. It is submitted once. One that is not submitted expires with its responses (`retention.exchanges_days`).
    """

    def __init__(self, run: _Home, name: str, group: str = "") -> None:
        if fault := name_fault(name):
            raise Invalid(f"rollout: {fault}", "rollout")
        self._name = name
        self._run = run
        self._group = group

    def __repr__(self) -> str:
        return f"<Rollout {self.name!r} of run {self._run.name!r}>"

    @property
    def name(self) -> str:
        """The rollout's name."""
        return self._name

    @property
    def root_url(self) -> str:
        """The base URL for Anthropic's clients, which add `/v1/messages`."""
        return self._run.base_url.removesuffix("/v1") + ROOT + quote(self.name, safe="")

    @property
    def base_url(self) -> str:
        """The base URL for OpenAI's clients, which ends in `/v1`."""
        return f"{self.root_url}/v1"

    @property
    def headers(self) -> dict[str, str]:
        """Headers that say the same as the URL, for a program whose URL cannot be set."""
        return dict.fromkeys(HEADERS, self.name)

    @property
    def api_key(self) -> str:
        """The gateway's bearer token."""
        return self._run.api_key

    @property
    def model(self) -> str:
        """The model name for requests: it stands for the newest served step."""
        return self._run.model

    def openai(self, **options: Any) -> AsyncOpenAI:
        """Return an AsyncOpenAI for this rollout. `options` go to its constructor. It closes with the client."""
        return self._run.openai(**({"base_url": self.base_url} | options))

    async def submit(
        self,
        reward: float,
        group: str = "",
        *,
        key: str | None = None,
        split: Split = "train",
        metrics: Mapping[str, float] | None = None,
        metadata: dict[str, Any] | None = None,
        advantages: Given = None,
        weights: Given = None,
    ) -> api.Submitted:
        """Submit all of it as one trajectory, as `Run.submit` does. `group`: "" = that of `Run.group`. Raises what `Run.submit` raises."""
        if not (group or self._group):
            raise Invalid(f"rollout {self.name!r} is of no group: give one", "group")
        return await self._run.submit(
            group or self._group,
            reward,
            rollout=self.name,
            key=key,
            split=split,
            metrics=metrics,
            metadata=metadata,
            advantages=advantages,
            weights=weights,
        )


class Group:
    """`n` rollouts of one prompt with fresh names; iterate over them. `name`: of the group that they are submitted to."""

    def __init__(self, run: _Home, prompt_id: str, n: int) -> None:
        if not 1 <= n <= MOST:
            raise Invalid(f"n: {n} is not from 1 to {MOST}", "n")
        self.name = f"{prompt_id}-{uuid.uuid4().hex[:12]}"
        self.rollouts = [Rollout(run, f"{self.name}-{number}", self.name) for number in range(n)]

    def __len__(self) -> int:
        return len(self.rollouts)

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)


@contextlib.asynccontextmanager
async def open_group(run: _Home, prompt_id: str, n: int) -> AsyncGenerator[Group, None]:
    """See `Run.group`."""
    group = Group(run, prompt_id, n)
    try:
        yield group
    except BaseException:
        with contextlib.suppress(NotFound):  # nothing was submitted
            await run.discard_group(group.name)
        raise
    try:
        await run.seal(group.name)
    except NotFound:
        log.warning("group %r ends without a submitted rollout", group.name)

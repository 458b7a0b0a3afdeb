"""What a rollout program sees of a real daemon: restarts that it does not notice, equal samples, the README's example."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from artd_client import Conflict, Submitted, turn
from artd_client.run import Run
from tests.daemon.rig import ROOT, Rig

pytestmark = pytest.mark.asyncio


@pytest.mark.parametrize("end", ["stop", "kill"])
async def test_a_restart_is_a_delay_and_nothing_else(rig: Rig, end: str) -> None:
    """No call of eight tasks raises, no sample counts twice, none is lost."""
    rig.start()
    answers: list[Submitted] = []

    async def program(run: Run, name: int) -> None:
        while True:
            answers.append(await run.submit(f"g{name}", 1.0, turns=[turn([1], [2, name], [-1.0, -1.0])]))
            await asyncio.sleep(0.001)

    def more() -> None:
        known = len(answers)
        rig.until(lambda: len(answers) > known + 20, "more answers")

    def restarts() -> None:
        for _ in range(2):
            more()
            getattr(rig, end)()
            rig.start()
        more()

    async with rig.run(group_size=100_000) as (_, run), asyncio.TaskGroup() as group:
        programs = [group.create_task(program(run, name)) for name in range(8)]
        await asyncio.to_thread(restarts)
        stored = rig.one("SELECT count(*) FROM trajectory")
        for task in programs:
            task.cancel()
    told = {answer.trajectory for answer in answers}
    assert len(told) == len(answers) >= stored - 8
    assert told <= {number for (number,) in rig.rows("SELECT id FROM trajectory")}


async def test_calls_that_reach_a_stopping_daemon_are_answered_by_the_next_one(rig: Rig) -> None:
    rig.script.write(hold__train__1=[1])
    rig.start()
    async with rig.run() as (client, run):
        await run.wait(0, timeout=60)
        for reward in (0.0, 1.0):
            await run.submit("g", reward, turns=[turn([1], [2], [-1.0])])
        rig.reached("train:1 1")
        rig.terminate()  # its trainer takes a while to go
        rig.until(lambda: rig.state() == "draining", "draining")
        calls = [run.submit("h", 0.0, turns=[turn([1], [3], [-1.0])]), run.pause(), run.seal("g"), run.wait(0)]
        asked: list[asyncio.Task[Any]] = [asyncio.create_task(call) for call in calls]
        assert [row["state"] for row in await client.runs()] == ["active"]
        assert not any(task.done() for task in asked)
        await asyncio.to_thread(rig.died)
        rig.script.write()
        await asyncio.to_thread(rig.start)
        submitted, _, sealed, step = await asyncio.gather(*asked)
        assert (submitted.duplicate, sealed.size, step.step) == (False, 2, 0)
        assert [row["state"] for row in await client.runs()] == ["paused"]


async def test_equal_samples_count_until_their_group_is_closed(rig: Rig) -> None:
    rig.start()
    body = [turn([1], [2], [-1.0])]
    async with rig.run(group_size=3) as (_, run):
        answers = [await run.submit("g", float(n % 2), turns=body) for n in (1, 1, 0)]
        assert [(answer.duplicate, answer.group_state) for answer in answers] == [
            (False, "open"), (False, "open"), (False, "sealed"),
        ]  # fmt: skip
        with pytest.raises(Conflict, match="takes no more"):
            await run.submit("g", 1.0, turns=body)


async def test_the_readmes_example(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it stands, but for the model's path, with fewer steps, and for a fake engine, which always says the same."""
    rig.script.write(http=1)
    rig.start()
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    changes = {
        r'model="smollm2-135m-instruct"': f"model={rig.model!r}", r"first \+ 10\)": "first + 2)",
        r"^asyncio\.run\(main\(\)\)$": "", r"1\.0 / max\(": "choice.index / max(", r'\["reward_mean"\]': '["loss"]',
    }  # fmt: skip
    for old, new in changes.items():
        code, count = re.subn(old, new, code, flags=re.M)
        assert count == 1, old
    monkeypatch.setenv("ARTD_DATA_DIR", str(rig.data))
    names: dict = {}
    exec(code, names)
    for _ in range(2):  # the second time it goes on where the first has ended
        await asyncio.wait_for(names["main"](), 60)
        assert len(capsys.readouterr().out.splitlines()) == 2
    rig.check(4 * 4 * 8)

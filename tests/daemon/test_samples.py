"""Trajectories as text by the client, over the wire: the same as `artctl` reads from the folder, daemon or not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from artd.cli import ctl
from artd_client import NotFound
from tests.daemon.rig import Rig
from tests.fakes.chat_model import turn, write_model

pytestmark = pytest.mark.asyncio
ASK = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"


async def test_the_client_and_the_command_read_the_same_text(rig: Rig, capsys: pytest.CaptureFixture[str]):
    rig.configure({"architectures": ["LlamaForCausalLM"], "vocab_size": 512})
    file = write_model(Path(rig.model)) / "tokenizer.json"
    rig.start()
    async with rig.run(group_size=4) as (_, run):
        for number, answer in enumerate(("5", "4", "\x1b[2J")):
            one = turn(ASK, f"<think>hm</think>\n{answer}<|im_end|>")
            await run.submit("g", float(number % 2), turns=[one], metadata={"of": number})
        content = file.read_bytes()
        file.unlink()
        [unread] = await run.samples(limit=1)
        assert "tokenizer.json cannot be read" in unread.problem
        assert unread.text == "prompt:\n[23 tokens]\n\nassistant:\n[10 tokens]"
        file.write_bytes(content)  # the client asks again
        best, *others = await run.samples(pick="best")
        assert [best.id, *(one.id for one in others)] == [2, 3, 1]
        assert (best.reward, best.group, best.state, best.problem) == (1.0, "g", "queued", "")
        assert best.text == "user:\n2+2?\n\nassistant:\n<think>\nhm\n</think>\n4"
        assert (best.messages[-1].text, best.messages[-1].thinking, best.messages[-1].turn) == ("4", "hm", 0)
        assert best.turns[0].token_ids == turn("", "<think>hm</think>\n4<|im_end|>").token_ids
        assert best.row["metrics"]["metadata"] == {"of": 1}
        nasty = await run.trajectory(3)
        assert nasty.text.endswith("\x1b[2J") and str(nasty).endswith("\\x1b[2J")
        assert await run.samples(step=7) == [] and await run.samples(split="eval") == []
        with pytest.raises(NotFound, match="has no trajectory 99"):
            await run.trajectory(99)
    rig.stop()
    assert ctl.main(["samples", "--best", "--json", "--data-dir", str(rig.data)]) == 0
    told = json.loads(capsys.readouterr().out)["samples"]
    assert [one["id"] for one in told] == [2, 3, 1]
    assert [m["text"] for m in told[0]["sequences"][0]["messages"]] == [m.text for m in best.messages]

"""openai-agents over both APIs: a tool, a stream, a typed answer, a sub-agent. Runs in an environment of its own."""

import asyncio
import os

from agents import (
    Agent,
    Runner,
    function_tool,
    set_default_openai_api,
    set_default_openai_client,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    answer: str


@function_tool
def calc(expr: str) -> str:
    """Calculate."""
    return "4"


async def main() -> None:
    set_tracing_disabled(True)
    set_default_openai_client(AsyncOpenAI(base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"]))
    for api in ("chat_completions", "responses"):
        set_default_openai_api(api)
        agent = Agent(name="a", instructions="be brief", tools=[calc], model="pol")
        print(api, "tool", (await Runner.run(agent, "2+2?")).final_output)
        streamed = Runner.run_streamed(agent, "2+2?")
        kinds = {event.type async for event in streamed.stream_events()}
        print(api, "stream", "raw_response_event" in kinds, streamed.final_output)
        print(
            api,
            "typed",
            (await Runner.run(Agent(name="t", output_type=Answer, model="pol"), "2+2?")).final_output.answer,
        )
        sub = Agent(name="sub", instructions="sub", model="pol").as_tool("ask_sub", "ask")
        print(api, "sub", (await Runner.run(Agent(name="top", tools=[sub], model="pol"), "2+2?")).final_output)


asyncio.run(main())

"""pydantic-ai over both APIs: plain, a tool, a stream, structured output. Runs in an environment of its own."""

import asyncio
import os

from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider


class Answer(BaseModel):
    answer: str


async def main() -> None:
    provider = OpenAIProvider(openai_client=AsyncOpenAI(base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"]))
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        model = kind("pol", provider=provider)
        agent = Agent(model, instructions="be brief")

        @agent.tool_plain
        def calc(expr: str) -> str:
            """Calculate."""
            return "4"

        print("plain", (await Agent(model).run("hi")).output)
        print("tool", (await agent.run("2+2?")).output)
        async with agent.run_stream("2+2?") as stream:
            print("stream", await stream.get_output())
        print("forced", (await Agent(model, output_type=Answer).run("hi")).output.answer)
        print("typed", (await Agent(model, output_type=NativeOutput(Answer)).run("hi")).output.answer)


asyncio.run(main())

"""LangChain: an agent with a tool, streams, structured output. Runs in an environment of its own."""

import os

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    answer: str


@tool
def calc(expr: str) -> str:
    """Calculate."""
    return "4"


chat = ChatOpenAI(model="pol", base_url=os.environ["BASE"] + "/v1", api_key=os.environ["KEY"])
agent = create_agent(chat, [calc])
found = agent.invoke({"messages": [("user", "2+2?")]})["messages"]
print("tool", [type(message).__name__ for message in found], found[-1].content)
print("stream", "".join(chunk.content for chunk in chat.stream("hi")))
print(
    "agent stream", len(list(agent.stream({"messages": [("user", "2+2?")]}, stream_mode=["updates", "messages"]))) > 3
)
print("typed", chat.with_structured_output(Answer).invoke("hi").answer)
print("forced", chat.with_structured_output(Answer, method="function_calling").invoke("hi").answer)

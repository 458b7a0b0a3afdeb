"""Anthropic's client: messages, tools, thinking, a stream, the tool runner with its threads. Runs in an environment of its own."""

import os

import anthropic
from anthropic import beta_tool

client = anthropic.Anthropic(base_url=os.environ["BASE"], api_key=os.environ["KEY"])
said = [{"role": "user", "content": "2+2?"}]
tools = [
    {"name": "calc", "description": "d", "input_schema": {"type": "object", "properties": {"expr": {"type": "string"}}}}
]
asked = client.messages.create(
    model="pol",
    max_tokens=16,
    messages=said,
    tools=tools,
    system="s",
    thinking={"type": "enabled", "budget_tokens": 1024},
)
print("tool", asked.stop_reason, asked.content[-1].input)
history = [
    *said,
    {"role": "assistant", "content": [block.model_dump() for block in asked.content]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": asked.content[-1].id, "content": "4"}]},
]
print("answer", client.messages.create(model="pol", max_tokens=16, tools=tools, messages=history).content[0].text)
with client.messages.stream(model="pol", max_tokens=16, messages=said, tools=tools) as stream:
    print("stream", [event.type for event in stream][-1], stream.get_final_message().content[-1].input)
print("count", client.messages.count_tokens(model="pol", messages=said, tools=tools).input_tokens > 0)


@beta_tool
def calc(expr: str) -> str:
    """Calculate."""
    return "4"


runner = client.beta.messages.tool_runner(model="pol", max_tokens=16, tools=[calc], messages=said)
print("runner", runner.until_done().content[0].text)

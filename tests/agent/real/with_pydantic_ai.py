"""pydantic-ai: an agent with a tool, and a second question in the same conversation."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="You add.")


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


[message] = json.load(sys.stdin)["prompt"]
first = agent.run_sync(message["content"])
second = agent.run_sync("Are you sure?", message_history=first.all_messages())
print(json.dumps({"reward": "7" in second.output}))

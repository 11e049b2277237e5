"""pydantic-ai: an agent with a tool, and a second question, whose answer has to be an object: a forced call."""

import json
import sys

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="You add.")


class Sum(BaseModel):
    total: int


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


[message] = json.load(sys.stdin)["prompt"]
first = agent.run_sync(message["content"])
second = agent.run_sync("Are you sure?", message_history=first.all_messages(), output_type=Sum)
print(json.dumps({"reward": second.output.total == 7}))

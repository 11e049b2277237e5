"""openai-agents: an agent with a tool, which hands over to another. Argument: the API, responses or
chat_completions."""

import json
import sys

from agents import Agent, Runner, function_tool, set_default_openai_api, set_tracing_disabled

set_tracing_disabled(True)  # it would send each episode's conversation to api.openai.com
set_default_openai_api(sys.argv[1])


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


checker = Agent(name="checker", instructions="Check the sum.", model="policy", tools=[add])
solver = Agent(name="solver", instructions="You add.", model="policy", tools=[add], handoffs=[checker])
result = Runner.run_sync(solver, json.load(sys.stdin)["prompt"], max_turns=6)
print(json.dumps({"reward": "7" in result.final_output, "checked": result.last_agent.name == "checker"}))

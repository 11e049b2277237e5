"""A loop with tools: the anthropic SDK, each second request as a stream."""

import json
import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS = [{"name": "add", "description": "Add two numbers.", "input_schema": SCHEMA}]

client = Anthropic()
messages = json.load(sys.stdin)["prompt"]
for turn in range(5):
    ask = {"model": "policy", "system": "You add.", "messages": messages, "tools": TOOLS, "max_tokens": 300}
    if turn % 2:
        with client.messages.stream(**ask) as stream:
            answer = stream.get_final_message()
    else:
        answer = client.messages.create(**ask)
    messages.append({"role": "assistant", "content": answer.content})
    calls = [block for block in answer.content if block.type == "tool_use"]
    if not calls:
        break
    sums = [(call.id, str(call.input["a"] + call.input["b"])) for call in calls]
    results = [{"type": "tool_result", "tool_use_id": name, "content": value} for name, value in sums]
    messages.append({"role": "user", "content": results})
print(json.dumps({"reward": "7" in answer.content[0].text}))

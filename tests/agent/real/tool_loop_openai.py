"""A loop with tools: the openai SDK, each second request as a stream."""

import json
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {name: {"type": "integer"} for name in "ab"}, "required": ["a", "b"]}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": PARAMETERS}}]

client = OpenAI()
messages = json.load(sys.stdin)["prompt"]
for turn in range(5):
    ask = {"model": "policy", "messages": messages, "tools": TOOLS, "max_tokens": 300}
    if turn % 2:
        with client.chat.completions.stream(**ask) as stream:
            answer = stream.get_final_completion().choices[0].message
    else:
        answer = client.chat.completions.create(**ask).choices[0].message
    messages.append(answer)
    if not answer.tool_calls:
        break
    for call in answer.tool_calls:
        given = json.loads(call.function.arguments)
        messages.append({"role": "tool", "tool_call_id": call.id, "content": str(given["a"] + given["b"])})
print(json.dumps({"reward": "7" in answer.content}))

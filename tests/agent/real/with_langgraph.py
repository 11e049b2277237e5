"""langgraph: the prebuilt graph of a model and its tools, with the memory of a thread."""

import json
import os
import sys

from langchain_openai import ChatOpenAI
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.prebuilt import create_react_agent


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


own = {"base_url": os.environ["OPENAI_BASE_URL"], "streaming": len(sys.argv) > 1}
model = ChatOpenAI(model="policy", temperature=0, **own)  # with --agent-kwargs ignore=temperature
graph = create_react_agent(model, [add], prompt="You add.", checkpointer=InMemorySaver())
thread = {"configurable": {"thread_id": "1"}}
graph.invoke({"messages": json.load(sys.stdin)["prompt"]}, thread)
result = graph.invoke({"messages": [{"role": "user", "content": "Are you sure?"}]}, thread)
print(json.dumps({"reward": "7" in result["messages"][-1].content}))

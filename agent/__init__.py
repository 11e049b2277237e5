"""Multi-turn episodes: the model's turns, its tool calls, simulated users. Names are imported on first use."""

from importlib import import_module

MODULES = {"make_episodes": "loop", "load_tools": "tools.builtin", "BaseInteraction": "interactions"}
MODULES |= {
    "load_agent": "http.program",
    "open_task": "tasks.sandbox",
    "MultiTurn": "multi_turn",
    "load_multi_turn": "multi_turn",
    "get_tool_parser": "tools.parsers",
}
MODULES |= dict.fromkeys(("BaseTool", "FunctionTool", "ToolCall", "ToolResponse"), "tools.base")


def __getattr__(name: str):
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"agent.{MODULES[name]}"), name)

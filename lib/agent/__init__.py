"""Multi-turn episodes: the model's turns, the tools that it calls, simulated users. A run without --multi-turn needs
agent_metrics only. The other names are imported when they are first used."""

from importlib import import_module

from lib.agent.metrics import agent_metrics as agent_metrics

MODULES = {"make_episodes": "agent_loop", "load_tools": "builtin_tools", "BaseInteraction": "interactions"}
MODULES |= {
    "load_agent": "program",
    "open_task": "task_sandbox",
    "MultiTurn": "multi_turn",
    "load_multi_turn": "multi_turn",
    "get_tool_parser": "parsers",
}
MODULES |= dict.fromkeys(("BaseTool", "FunctionTool", "ToolCall", "ToolResponse"), "tools")


def __getattr__(name: str):
    if name not in MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"lib.agent.{MODULES[name]}"), name)

"""Multi-turn episodes: the model's turns, the tools that it calls, simulated users.

A run without --multi-turn needs agent_metrics only. The other names are imported when they are first used.
"""

from importlib import import_module

from lib.agent.metrics import agent_metrics as agent_metrics

NAMES = {
    "agent_loop": ("make_episodes",),
    "builtin_tools": ("load_tools",),
    "interactions": ("BaseInteraction",),
    "multi_turn": ("MultiTurn", "load_multi_turn"),
    "parsers": ("get_tool_parser",),
    "tools": ("BaseTool", "FunctionTool", "ToolCall", "ToolResponse"),
}


def __getattr__(name: str):
    for module, names in NAMES.items():
        if name in names:
            return getattr(import_module(f"lib.agent.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

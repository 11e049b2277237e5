"""Episodes of several turns: the model's turns, the tools that it calls, simulated users."""

from lib.agent.agent_loop import MultiTurn, agent_metrics, generate_multi_turn, load_multi_turn
from lib.agent.tools import BaseInteraction, BaseTool, ToolCall, get_tool_parser, load_tools

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "MultiTurn",
    "ToolCall",
    "agent_metrics",
    "generate_multi_turn",
    "get_tool_parser",
    "load_multi_turn",
    "load_tools",
]

"""Multi-turn episodes: the model's turns, the tools that it calls, simulated users."""

from lib.agent.agent_loop import Episodes, ServerEpisodes, agent_metrics, generate_multi_turn, make_episodes
from lib.agent.builtin_tools import load_tools
from lib.agent.interactions import BaseInteraction
from lib.agent.multi_turn import MultiTurn, load_multi_turn
from lib.agent.parsers import get_tool_parser
from lib.agent.tools import BaseTool, FunctionTool, ToolCall, ToolResponse

__all__ = [
    "BaseInteraction",
    "BaseTool",
    "Episodes",
    "FunctionTool",
    "MultiTurn",
    "ServerEpisodes",
    "ToolCall",
    "ToolResponse",
    "agent_metrics",
    "generate_multi_turn",
    "get_tool_parser",
    "load_multi_turn",
    "load_tools",
    "make_episodes",
]

"""Tool classes with verl's constructor, (config, tool_schema), and verl's YAML files that list them."""

import inspect
import json
import numbers
from collections.abc import Iterator
from typing import Any

from agent.tools.base import LARGEST_METRIC, BaseTool, ToolSchema, _call, say
from lib import InputError
from lib.cli.user_code import load_class
from lib.cli.yaml_files import SafeLoader, read_yaml

FORM = "write `tools:` and a list of class_name, config and tool_schema"


class VerlTool(BaseTool):
    """An object of a verl class, whose methods may be async or not. Metrics that are not numbers are left out: verl
    reads none. Calls of an execute that is not async run in order."""

    def __init__(self, tool: Any):
        self.tool, self.ids = tool, dict[str, str]()  # by the episode's: what create returned
        self.returns_images = getattr(tool, "returns_images", False)
        self.in_order = getattr(tool, "in_order", not inspect.iscoroutinefunction(tool.execute))
        self.schema = tool.get_openai_tool_schema()
        if hasattr(self.schema, "model_dump"):
            self.schema = self.schema.model_dump(exclude_unset=True, exclude_none=True)

    async def create(self, instance_id: str, **kwargs) -> None:
        """verl passes create_kwargs as a dict; before its version 0.5 it passed what is in them."""
        if not hasattr(self.tool, "create"):
            return
        takes, given = inspect.signature(self.tool.create).parameters, kwargs | {"create_kwargs": kwargs}
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
            given = {name: given[name] for name in given if name in takes} if "create_kwargs" in takes else kwargs
        made = await _call(self.tool.create, instance_id, **given)
        made = made[0] if isinstance(made, tuple) and made else made
        self.ids[instance_id] = made if isinstance(made, str) else instance_id

    async def execute(self, instance_id: str, parameters: dict, **kwargs):
        value = await _call(self.tool.execute, self.ids.get(instance_id, instance_id), parameters, **kwargs)
        if not (isinstance(value, tuple) and len(value) == 3 and isinstance(value[2], dict)):
            return value
        response, reward, metrics = value
        real = {key: n for key, n in metrics.items() if isinstance(n, numbers.Real)}
        kept = {key: n for key, n in real.items() if abs(n) <= LARGEST_METRIC}  # type: ignore[operator]
        return response, 0.0 if reward is None else reward, kept

    async def calc_reward(self, instance_id: str, **kwargs) -> float:
        own = getattr(self.tool, "calc_reward", super().calc_reward)
        return await _call(own, self.ids.get(instance_id, instance_id), **kwargs)

    async def release(self, instance_id: str, **kwargs) -> None:
        own = getattr(self.tool, "release", super().release)
        await _call(own, self.ids.pop(instance_id, instance_id), **kwargs)


def make_tool(where: str, cls: Any, config: dict | None = None, schema: dict | None = None) -> BaseTool:
    """config, schema: of a YAML file. Raises InputError for what is not a tool class, and if its constructor fails."""
    if not (inspect.isclass(cls) and hasattr(cls, "execute")):
        raise InputError(f"{where}: neither a function nor a class with the methods of agent.BaseTool")
    try:
        parameters = inspect.signature(cls).parameters.values()
        takes_none = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
        if config is None and takes_none:
            return cls() if issubclass(cls, BaseTool) else VerlTool(cls())
        of_file: Any = {"config": config or {}, "tool_schema": schema and ToolSchema(schema)}
        return VerlTool(cls(**of_file))
    except Exception as error:
        advice = "" if schema else "; a YAML file gives it config and tool_schema (docs/multi_turn.md)"
        raise InputError(f"{where}: its constructor raises {say(error).splitlines()[0][:300]}{advice}") from error


def load_yaml(path: str) -> Iterator[BaseTool]:
    """The tools of a YAML file in verl's form. Raises InputError."""
    where = f"--multi-turn.tools {path}"
    tree = read_yaml(path, where, SafeLoader)
    if not (isinstance(tree, dict) and [*tree] == ["tools"] and isinstance(tree["tools"], list)):
        raise InputError(f"{where}: {FORM}")
    for number, entry in enumerate(tree["tools"], 1):
        line = f"{where} tool {number}"
        text = json.dumps(entry, default=str)  # a date stays a text
        if "${" in text:
            raise InputError(f"{line}: ${{...}} of OmegaConf: write the value, or read os.environ in the class")
        own = json.loads(text)
        if not isinstance(own, dict) or own.keys() - {"class_name", "config", "tool_schema"}:
            raise InputError(f"{line}: {FORM}, and nothing else")
        name, config, schema = own.get("class_name"), own.get("config") or {}, own.get("tool_schema")
        if not (isinstance(name, str) and isinstance(config, dict) and isinstance(schema, dict | None)):
            raise InputError(f"{line}: class_name must be a text, config and tool_schema mappings")
        if (kind := config.get("type", "native")) != "native":
            raise InputError(f"{line}: config.type {kind}: only native; an MCP server is --multi-turn.tools mcp:...")
        yield make_tool(f"{line}: {name}", load_class(f"{line}: class_name", name), config, schema)

"""The tools of a row: its extra_info may name some of the run's."""

from lib import InputError


def shown_tools(schemas: list[dict], extra_info: dict) -> list[dict]:
    """The schemas of a run's tools that a row's prompt shows: those of its tool_selection, else those that its
    tools_kwargs name, else all. Raises InputError for other names, and for what is not a list or nested dicts."""
    if not schemas:
        return []
    known = [schema.get("function", schema)["name"] for schema in schemas]
    chosen, kwargs = extra_info.get("tool_selection"), extra_info.get("tools_kwargs") or {}
    dicts = [kwargs]
    for _ in range(3):  # all tools, a tool, its create
        if not all(isinstance(own, dict) for own in dicts):
            form = 'write {tool: {"create_kwargs": {...}, "execute_kwargs": {...}}}'
            raise InputError(f"tools_kwargs {kwargs!r:.100}: {form}")
        dicts = [value for own in dicts for value in own.values() if value is not None]
    named = [name for name, own in kwargs.items() if own is not None]
    if not isinstance(chosen, list | None):
        raise InputError(f"tool_selection {chosen!r:.100}: write a list of names")
    for name in [*(chosen or []), *named]:
        if name not in known:
            raise InputError(f"there is no tool {str(name)[:100]!r}; --multi-turn.tools has {', '.join(known)}")
    chosen = (named or known) if chosen is None else chosen
    return [schema for name, schema in zip(known, schemas) if name in chosen]


def template_of_row(schemas: list[dict], extra_info: dict) -> tuple[dict, str]:
    """(keywords of the row's chat template, a note on the row or ""). Raises InputError."""
    lacks = extra_info.get("need_tools_kwargs") and not extra_info.get("tools_kwargs")
    note = "need_tools_kwargs is true, and there are no tools_kwargs" if lacks else ""
    return {"tools": shown_tools(schemas, extra_info) or None}, note

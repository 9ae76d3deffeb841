"""Which tools a model may call, and whether it must: `tools` and `tool_choice` of OpenAI's API."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.core.prompt import ToolChoice
from ggpipe.errors import BodyError

_NAME = re.compile(r"[\w.:/-]{1,128}")
_NO_PARAMETERS = {"type": "object", "properties": {}}  # templates look for them


def tool_choice(
    tools: Sequence[Mapping[str, Any]], choice: Any = None, parallel: bool | None = None
) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
    """The tools that a model may call, and whether it must. `choice`, `parallel`: `tool_choice` and
    `parallel_tool_calls` of OpenAI's API.

    Raises BodyError, which names the field.
    """
    checked = tuple(_checked(tool, f"tools[{i}]") for i, tool in enumerate(tools))
    names = [tool["function"]["name"] for tool in checked]
    several = True if parallel is None else parallel
    match choice:
        case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list() as allowed}} | {
            "type": "allowed_tools",
            "mode": mode,
            "tools": list() as allowed,
        }:
            wanted = [_name(one) for one in allowed]
            if mode not in ("auto", "required") or not all(name in names for name in wanted):
                raise BodyError(
                    "`tool_choice` of allowed tools must have the mode auto or required, and functions of `tools`",
                    "tool_choice",
                )
            return tool_choice([tool for tool in checked if tool["function"]["name"] in wanted], mode, parallel)
        case None | "auto":
            return checked, ToolChoice(parallel=several)
        case "none":
            return (), ToolChoice()
        case "required":
            name = None
        case {"type": "function", "function": {"name": str() as name}} | {"type": "function", "name": str() as name}:
            if name not in names:
                raise BodyError(f"`tool_choice` names the function {name!r}, which is not in `tools`", "tool_choice")
        case _:
            raise BodyError(
                "`tool_choice` must be auto, none, required or a function, as in "
                '{"type": "function", "function": {"name": "..."}}',
                "tool_choice",
            )
    if not checked:
        raise BodyError("`tool_choice` wants a call, but there are no `tools`", "tool_choice")
    return checked, ToolChoice(must_call=True, name=name, parallel=several and name is None)


def _name(function: object) -> str | None:
    """The name of a function in `tool_choice`; None where it has none."""
    match function:
        case {"function": {"name": str() as name}} | {"name": str() as name}:
            return name
    return None


def _checked(tool: Mapping[str, Any], at: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or tool.get("type", "function") != "function":
        why = '{"type": "function", "function": {"name": "..."}}'
        raise BodyError(f"`{at}` must be a function, as in {why}", at)
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise BodyError(f"`{at}.function.name` must be of letters, digits and _ - . : / alone", f"{at}.function.name")
    if schema is not None and not isinstance(schema, Mapping):
        raise BodyError(f"`{at}.function.parameters` must be a JSON schema", f"{at}.function.parameters")
    return {**tool, "type": "function", "function": {**function, "parameters": schema or _NO_PARAMETERS}}

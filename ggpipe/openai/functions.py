"""`functions` and `function_call`: what OpenAI's chats had before `tools`, and older clients still send.

They become tools, of which a text calls one at most, and its answer has `function_call` again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ggpipe.chat.tools.choice import tool_choice
from ggpipe.errors import BodyError
from ggpipe.prompt import ToolChoice

REASON = "function_call"
"""Why a text ended that calls a function."""
_TOOL = re.compile(r"tools\[(\d+)\](\.function)?")


def functions_as_tools(functions: Sequence[dict[str, Any]], call: Any) -> tuple[tuple[dict[str, Any], ...], ToolChoice]:
    """The tools that a model may call, and what is wanted of it. Raises BodyError."""
    match call:
        case None | "auto" | "none":
            choice = call
        case {"name": str() as name}:
            choice = {"type": "function", "function": {"name": name}}
        case _:
            raise BodyError('`function_call` must be auto, none or a function, as in {"name": "..."}', "function_call")
    try:
        return tool_choice([{"type": "function", "function": one} for one in functions], choice, parallel=False)
    except BodyError as e:
        raise BodyError(_in_functions(str(e)), _in_functions(e.param or "") or None) from e


def messages_with_tools(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages of a conversation, with calls of functions and their results as those of tools. Raises BodyError."""
    found, latest = [], ""
    for i, message in enumerate(messages):
        own, call = {name: value for name, value in message.items() if name != "function_call"}, None
        if message.get("role") == "assistant" and not message.get("tool_calls"):
            call = message.get("function_call")
        if call is not None:
            if not isinstance(call, dict):
                at = f"messages[{i}].function_call"
                raise BodyError(f"`{at}` must be an object with a name and arguments", at)
            latest = f"call{i % 100000:05}"  # some templates want nine letters and digits
            own["tool_calls"] = [{"id": latest, "type": "function", "function": call}]
        elif message.get("role") == "function":
            own |= {"role": "tool", "tool_call_id": latest}
        found.append(own)
    return found


def message_with_function(message: dict[str, Any]) -> dict[str, Any]:
    """An answer that calls a tool, as one that calls a function."""
    own = {name: value for name, value in message.items() if name != "tool_calls"}
    calls = message.get("tool_calls")
    return {**own, "function_call": calls[0]["function"]} if calls else own


def _in_functions(text: str) -> str:
    text = _TOOL.sub(r"functions[\1]", text).replace("`tools`", "`functions`")
    return text.replace("tool_choice", "function_call")

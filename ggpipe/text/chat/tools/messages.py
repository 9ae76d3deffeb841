"""Tools, calls and their results in a conversation, in the form that its template expects."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.text.chat.transcript import ChatMessage

_HOW_TO_CALL = """You can call these functions:

TOOLS

To call one, answer with nothing but a line of JSON: {"name": "its name", "arguments": {"a parameter": "its value"}}. \
For several calls, write a line for each. The results come with the next message. Where no function helps, answer as \
usual."""


def for_template(
    messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]], source: str, arguments_as_text: bool
) -> list[ChatMessage]:
    """The messages in the form that a template expects. `source`: of the template. `arguments_as_text`: a few templates
    expect arguments as strings of JSON instead of objects. If the template has no support for tools, they become text.
    """
    names = {
        call.get("id"): _function(call).get("name") for message in messages for call in message.get("tool_calls") or ()
    }
    found = [_message(message, names, arguments_as_text) for message in messages]
    if "tools" in source or "tool_calls" in source:
        return found
    found = [_as_text(message) for message in found]
    return _with_tools(found, tools) if tools else found


def tool_for_template(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool with the fields that all templates may expect, as llama-server has them."""
    function = _function(tool)
    fields = {"name": function.get("name"), "description": function.get("description") or ""}
    return {"type": "function", "function": {**fields, "parameters": function.get("parameters") or {}}}


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _message(message: ChatMessage, names: Mapping[Any, Any], arguments_as_text: bool) -> ChatMessage:
    if message.get("role") == "tool" and "name" not in message and message.get("tool_call_id") in names:
        return {**message, "name": names[message.get("tool_call_id")]}
    if not message.get("tool_calls"):
        return {name: value for name, value in message.items() if name != "tool_calls"}
    calls = []
    for call in message["tool_calls"]:
        function = _function(call)
        arguments = _arguments(function.get("arguments"), arguments_as_text)
        calls.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _arguments(arguments: Any, as_text: bool) -> Any:
    if as_text:
        return arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    if isinstance(arguments, str):
        try:
            found = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return arguments  # the call was cut off
        return found if isinstance(found, dict) else arguments
    return arguments or {}


def _as_text(message: ChatMessage) -> ChatMessage:
    """A message for a template without support for tools."""
    if message.get("role") == "tool":
        name = message.get("name") or "the function"
        return {"role": "user", "content": f"Result of {name}:\n{message.get('content') or ''}"}
    if not message.get("tool_calls"):
        return message
    content = message["content"]
    parts = [{"text": content}] if isinstance(content, str) else [part for part in content if isinstance(part, Mapping)]
    lines = [part["text"] for part in parts if isinstance(part.get("text"), str) and part["text"]]
    for call in message["tool_calls"]:
        function = _function(call)
        lines.append(json.dumps({"name": function.get("name"), "arguments": function["arguments"]}, ensure_ascii=False))
    return {"role": "assistant", "content": "\n".join(lines)}


def _with_tools(messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]]) -> list[ChatMessage]:
    lines = (json.dumps(_function(tool), ensure_ascii=False) for tool in tools)
    text = _HOW_TO_CALL.replace("TOOLS", "\n".join(lines), 1)
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    if isinstance(content, str):
        return [{**first, "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]
    return [{**first, "content": [*(content or ()), {"type": "text", "text": text}]}, *messages[1:]]

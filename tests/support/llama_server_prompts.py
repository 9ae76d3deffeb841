"""Conversations of which llama-server made prompts, and the table of these prompts' hashes."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path
from typing import Any

from support import llama_cpp_source

TABLE = Path(__file__).parents[1] / "text" / "chat" / "llama_server_prompts.json"
"""For each template, a hash for each of `BODIES`; null where llama-server refuses the conversation."""
NOW = datetime.datetime(2025, 8, 1, 12)
"""The time at which the prompts were made."""

SYSTEM = {"role": "system", "content": 'You know "all" tales & <b>songs</b>.'}
USER = {"role": "user", "content": "Who lives in the château? 🏰"}
REASONED = {"role": "assistant", "content": "A king.", "reasoning_content": "A castle…"}
AGAIN = {"role": "user", "content": "And who else?"}
ARGUMENTS = '{"place": "château", "days": 3, "parts": ["hall", "tower"]}'
FUNCTION = {"name": "look", "arguments": ARGUMENTS}
CALL = {
    "role": "assistant", "content": "", "reasoning_content": "I must look.",
    "tool_calls": [{"id": "call00001", "type": "function", "function": FUNCTION}],
}  # fmt: skip
RESULT = {
    "role": "tool", "tool_call_id": "call00001", "name": "look", "content": '{"seen": ["a king", "his daughter"]}',
}  # fmt: skip
PROPERTIES = {
    "place": {"type": "string", "description": "Which one."},
    "days": {"type": "integer"},
    "parts": {"type": "array", "items": {"type": "string", "enum": ["hall", "tower"]}},
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name, "description": description,
            "parameters": {"type": "object", "properties": properties, **required},
        },
    }
    for name, description, properties, required in (
        ("look", "Look into a place; 'all' is <everything>.", PROPERTIES, {"required": ["place"]}),
        ("wait", "Wait a day.", {}, {}),
    )
]  # fmt: skip
BODIES: dict[str, dict[str, Any]] = {
    "question": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "turns": {"messages": [SYSTEM, USER, REASONED, AGAIN]},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "called": {"messages": [USER, CALL, RESULT], "tools": TOOLS},
    "without thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "nothing to answer": {"messages": [USER, REASONED, AGAIN], "add_generation_prompt": False},
}
"""Bodies of llama-server's `/apply-template`."""


def templates() -> list[Path]:
    """All templates that llama.cpp has for its tests. Raises OSError if its source cannot be had."""
    return sorted((llama_cpp_source.source() / "models" / "templates").glob("*.jinja"))


def hash_of(prompt: str) -> str:
    """What the table has for a prompt."""
    return hashlib.sha256(prompt.encode()).hexdigest()[:16]

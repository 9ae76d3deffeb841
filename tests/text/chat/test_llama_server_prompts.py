"""Prompts are those of llama-server, for all templates that llama.cpp has for its tests."""

from __future__ import annotations

import json

import pytest
from support import llama_server_prompts
from support.llama_server_prompts import BODIES, NOW, TABLE, hash_of

from ggpipe.errors import UsageError
from ggpipe.text.chat.template import ChatTemplate

IN_WORDS = "The template does not describe tools. ggpipe does in words; llama-server's model does not learn of them."
FUNCTIONS = "The template wants `functions`, which llama-server leaves empty."
UNDEFINED = "llama-server leaves add_generation_prompt undefined, which the template takes for true."
DIFFERENT = {
    ("HuggingFaceTB-SmolLM3-3B", "tools"): IN_WORDS,
    ("HuggingFaceTB-SmolLM3-3B", "called"): IN_WORDS,
    ("google-gemma-2-2b-it", "tools"): IN_WORDS,
    ("llama-cpp-rwkv-world", "tools"): IN_WORDS,
    ("llama-cpp-rwkv-world", "called"): IN_WORDS,
    ("microsoft-Phi-3.5-mini-instruct", "tools"): IN_WORDS,
    ("microsoft-Phi-3.5-mini-instruct", "called"): IN_WORDS,
    ("fireworks-ai-llama-3-firefunction-v2", "tools"): FUNCTIONS,
    ("fireworks-ai-llama-3-firefunction-v2", "called"): FUNCTIONS,
    ("google-gemma-4-31B-it-interleaved", "called"): "llama-server mends the order of turns in this older template.",
    (
        "openbmb-MiniCPM5-1B",
        "called",
    ): "A list as text is ['hall', 'tower'] in transformers, halltower in llama-server.",
    ("unsloth-mistral-Devstral-Small-2507", "turns"): "llama-server loses answers that have reasoning.",
    ("unsloth-mistral-Devstral-Small-2507", "nothing to answer"): "llama-server loses answers that have reasoning.",
    ("llama-cpp-rwkv-world", "nothing to answer"): UNDEFINED,
    ("upstage-Solar-Open-100B", "nothing to answer"): UNDEFINED,
}
"""Where ggpipe's prompt is different, and why."""


def rendered(template: ChatTemplate, body: dict[str, object]) -> str | None:
    messages, tools, further = (body.get(name, ()) for name in ("messages", "tools", "chat_template_kwargs"))
    try:
        return template.conversation(messages, tools, body.get("add_generation_prompt", True), **dict(further))[0]  # type: ignore[arg-type,call-overload]
    except UsageError:
        return None


def test_prompts_are_those_of_llama_server() -> None:
    try:
        paths = llama_server_prompts.templates()
    except OSError as e:
        pytest.skip(f"llama.cpp's templates cannot be had: {e}")
    table = json.loads(TABLE.read_text())
    assert [path.stem for path in paths] == list(table), "run scripts/bench/llama_server_prompts"
    different = set()
    for path in paths:
        template = ChatTemplate(path.read_text(), "<s>", "</s>", now=lambda: NOW)
        for (name, body), expected in zip(BODIES.items(), table[path.stem], strict=True):
            prompt = rendered(template, body)
            if expected is not None and (prompt is None or hash_of(prompt) != expected):
                different.add((path.stem, name))
    assert different == set(DIFFERENT)

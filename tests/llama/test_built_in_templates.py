"""The chat templates that are built into libllama."""

from __future__ import annotations

import ctypes

import pytest

from ggpipe.errors import UsageError
from ggpipe.llama import built_in_templates
from ggpipe.llama.libllama import lib
from ggpipe.text.chat.built_in import BUILT_IN_TEMPLATES


def test_all_names_are_known() -> None:
    n = lib.llama_chat_builtin_templates(None, 0)
    names = (ctypes.c_char_p * n)()
    lib.llama_chat_builtin_templates(names, n)
    assert {name.decode() for name in names if name} == {"chatml", *BUILT_IN_TEMPLATES}


def test_a_conversation() -> None:
    text = built_in_templates.apply("llama3", [("system", "Be kind."), ("user", "Où? 🏰")], True)
    assert text == (
        "<|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nOù? 🏰<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert text.startswith(built_in_templates.apply("llama3", [("system", "Be kind."), ("user", "Où? 🏰")], False))


def test_no_such_template() -> None:
    with pytest.raises(UsageError, match="the chat template llama9 does not take this conversation"):
        built_in_templates.apply("llama9", [("user", "Hi")], True)

"""Prompts that do not fit the context are refused before the model is loaded."""

from __future__ import annotations

import pytest
from support.commands import TARGET
from support.in_process import ggpipe

from ggpipe.cli.prompt_check import check_fits
from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.prompt import Conversation, RequestPrompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import PromptTooLong

LONG = "once upon a time " * 300


def fits(prompt: RequestPrompt, n_ctx: int, path: object = TARGET) -> bool:
    config = EngineConfig(ModelConfig(path=path), ContextConfig(n_ctx=n_ctx))  # type: ignore[arg-type]
    try:
        check_fits(RequestSpec(prompt=prompt), config)
    except PromptTooLong as e:
        return e.n_prompt < e.n_ctx
    return True


def test_long_prompts_are_counted() -> None:
    chat = Conversation(messages=({"role": "user", "content": LONG},))
    for prompt in (LONG.encode(), tuple(range(5, 1300)), chat):
        assert not fits(prompt, 512)
        assert fits(prompt, 4096)
        assert fits(prompt, 0)


def test_libllama_rounds_contexts_up() -> None:
    assert fits(tuple(range(5, 205)), 16)
    assert not fits(tuple(range(5, 305)), 16)


def test_without_the_file_ranks_check() -> None:
    assert fits(LONG.encode(), 512, TARGET.with_name("missing.gguf"))


def test_no_rank_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpipe.cli.launching.run_this_rank", lambda *_, **__: pytest.fail("loaded"))
    result = ggpipe("generate", "-m", TARGET, "-c", "512", "-p", LONG)
    assert result.returncode == 2
    assert "tokens, but the context only 512: raise -c/--ctx-size" in result.stderr

"""`ggpipe chat`: a conversation in the terminal or, without a terminal, a single question."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace

from ggpipe.channel.client import StartedRanks
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import warn
from ggpipe.cli.talk.answer import Answerer, ModelReply
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal, unechoed
from ggpipe.display.stdout import Stdout
from ggpipe.errors import Setting, UsageError
from ggpipe.options.chat import ChatSettings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import sampling_config
from ggpipe.options.settings import ChatOutput, DisplaySettings, PromptSettings


def run(options: Options) -> int:
    """Chat, answer a question from stdin, or be one of the ranks. Returns the exit code."""
    config = replace(engine_config(options), cache_prompt=True)
    question = functools.cache(lambda: _question(options))

    def front_end(ranks: StartedRanks) -> int:
        _chat(ranks, options, question())
        return 0

    with unechoed():
        return run_command(config, options, front_end, prepare=question, ctrl_c_ends=not sys.stdin.isatty())


def _question(options: Options) -> str | None:
    """The first question, or the only one if stdin is not a terminal. Raises UsageError for all mistakes in options."""
    _settings(options).check_template()
    sampling_config(options)
    prompt, is_only_one = options[PromptSettings], not sys.stdin.isatty()
    parts = [prompt.read()] if prompt.text is not None or prompt.file is not None else []
    if is_only_one:
        parts.append(sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n"))
    question = "\n\n".join(part for part in parts if part)
    if is_only_one and not question:
        raise UsageError(
            "stdin is neither a terminal nor contains a question: write one to it, or use ", Setting("prompt")
        )
    return question or None


def _settings(options: Options) -> ChatSettings:
    return ChatSettings(**{**options.fields(ChatSettings), "single_turn": True})


def _chat(ranks: StartedRanks, options: Options, question: str | None) -> None:
    terminal = open_terminal(options[DisplaySettings].color)
    with LiveDisplay(terminal, ranks.ranks) as display:
        display.loading()
        engine = ranks.load()
    for warning in (*warnings_of(options), *engine.warnings):
        warn(warning)
    settings, sampling, is_only_one = (
        _settings(options),
        sampling_config(options, engine.sampling),
        not sys.stdin.isatty(),
    )
    stdout = None if terminal is not None and terminal.stdout_shared else Stdout(sys.stdout)
    markdown = options[ChatOutput].markdown and not is_only_one
    n_predict, speculation = options[PromptSettings].n_predict, speculation_config(options)
    answerer = Answerer(ranks, engine, terminal, stdout, markdown, n_predict, speculation)
    if is_only_one:
        said = [("system", settings.system), ("user", question)]
        conversation = settings.of_messages(
            [{"role": role, "content": text} for role, text in said if text is not None]
        )
        answerer.answer(conversation, sampling, ModelReply())
        return
    from ggpipe.cli.talk.talk import Talk  # needs prompt_toolkit

    Talk(answerer, terminal, sampling, settings.of_messages([]), settings.system).run(question)

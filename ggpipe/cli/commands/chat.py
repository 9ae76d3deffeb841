"""`ggpipe chat`: a conversation in the terminal or, without a terminal, a single question."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggpipe.channel.client import StartedRanks
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import warn
from ggpipe.cli.talk.answer import Answerer, ModelReply
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import Conversation
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal, unechoed
from ggpipe.display.stdout import Stdout
from ggpipe.errors import Setting, UsageError, Wording
from ggpipe.options.chat import ChatSettings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import ChatOutput, DisplaySettings, PromptSettings


def run(options: Options) -> int:
    """Chat, answer a question from stdin, or be one of the ranks. Returns the exit code."""
    config = replace(engine_config(options), cache_prompt=True)
    task = functools.cache(lambda: _task_of(options))

    def front_end(ranks: StartedRanks) -> int:
        _serve(ranks, task(), options, warnings_of(options))
        return 0

    with unechoed():
        return run_command(config, options, front_end, prepare=task, ctrl_c_ends=not sys.stdin.isatty())


@dataclass(frozen=True, kw_only=True)
class _Task:
    """What to do."""

    question: str | None
    """The first question."""
    is_only_one: bool
    """There will be no further question: stdin is not a terminal."""
    settings: Conversation
    """The conversation, without messages."""
    system: str | None
    sampling: SamplingOf
    n_predict: int
    speculation: SpeculationConfig


def _task_of(options: Options) -> _Task:
    """Raises UsageError and SettingError."""
    chat = ChatSettings(**{**options.fields(ChatSettings), "single_turn": True})
    prompt, is_only_one = options[PromptSettings], not sys.stdin.isatty()
    parts = [prompt.read()] if prompt.text is not None or prompt.file is not None else []
    if is_only_one:
        parts.append(sys.stdin.buffer.read().decode("utf-8", "replace").removesuffix("\n"))
    question = "\n\n".join(part for part in parts if part)
    if is_only_one and not question:
        raise UsageError(
            "stdin is neither a terminal nor contains a question: write one to it, or use ", Setting("prompt")
        )
    sampling_config(options)  # to find mistakes now
    return _Task(
        question=question or None,
        is_only_one=is_only_one,
        settings=chat.of_messages([]),
        system=chat.system,
        sampling=functools.partial(sampling_config, options),
        n_predict=prompt.n_predict,
        speculation=speculation_config(options),
    )


def _serve(ranks: StartedRanks, task: _Task, options: Options, warnings: Sequence[Wording]) -> None:
    terminal = open_terminal(options[DisplaySettings].color)
    with LiveDisplay(terminal, ranks.ranks) as display:
        display.loading()
        engine = ranks.load()
    for warning in (*warnings, *engine.warnings):
        warn(warning)
    sampling = task.sampling(engine.sampling)
    stdout = None if terminal is not None and terminal.stdout_shared else Stdout(sys.stdout)
    markdown = options[ChatOutput].markdown and not task.is_only_one
    answerer = Answerer(ranks, engine, terminal, stdout, markdown, task.n_predict, task.speculation)
    if task.is_only_one:
        said = [("system", task.system), ("user", task.question)]
        messages = tuple({"role": role, "content": text} for role, text in said if text is not None)
        answerer.answer(replace(task.settings, messages=messages), sampling, ModelReply())
        return
    from ggpipe.cli.talk.talk import Talk  # needs prompt_toolkit

    Talk(answerer, terminal, sampling, task.settings, task.system).run(task.question)

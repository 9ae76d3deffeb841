"""`ggpipe generate`: generate text from a prompt."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs
from rich.style import Style

from ggpipe.channel.client import EngineClient, StartedRanks
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import print_past_mpirun, show, warn
from ggpipe.cli.prompt_check import check_fits
from ggpipe.core.prompt import as_prompt
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.display.figures.trace import write_trace
from ggpipe.display.files import check_writable, write_json
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.origins import origin_style
from ggpipe.display.stdout import Stdout
from ggpipe.display.tables.summary import append_csv, print_summary, request_object
from ggpipe.errors import GgpipeError, RunError, Setting, Wording
from ggpipe.options.chat import ChatSettings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import Color, DisplaySettings, GenerateOutput, PromptSettings
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.reasoning import Piece, ReasoningParser


def run(options: Options) -> int:
    """Load the models and generate, or be one of the ranks. Returns the exit code."""
    config, output = engine_config(options), options[GenerateOutput]
    request = functools.cache(lambda: request_of(options))

    def front_end(ranks: StartedRanks) -> int:
        answer(ranks, request(), output, options[DisplaySettings].color, warnings_of(options))
        return 0

    return run_command(config, options, front_end, prepare=lambda: check_fits(request().spec, config))


@dataclass(frozen=True)
class GenerateRequest:
    """A prompt, and how to continue it."""

    text: str
    """The prompt, or the user message of the conversation."""
    spec: RequestSpec
    """The request, except for its sampling settings."""
    sampling: SamplingOf


def request_of(options: Options) -> GenerateRequest:
    """The request that a command line describes. Raises UsageError and SettingError."""
    prompt = options[PromptSettings]
    text = prompt.read()
    options[ChatSettings].check_template()
    sampling_config(options)  # to find mistakes now
    own = as_prompt(options[ChatSettings].conversation(text) or text)
    spec = RequestSpec(prompt=own, n_predict=prompt.n_predict, speculation=speculation_config(options))
    return GenerateRequest(text, spec, functools.partial(sampling_config, options))


def answer(
    ranks: StartedRanks, request: GenerateRequest, output: GenerateOutput, color: Color, warnings: Sequence[Wording]
) -> tuple[EngineClient, RequestStats]:
    """Load the models, serve one request, show its output and its figures, and write the files.

    Raises the errors of `StartedRanks.load` and `EngineClient.generate`, and RunError if stdout cannot be written. The
    output so far is shown nevertheless, with its figures.
    """
    check_writable(output.csv, output.json, output.trace)
    terminal = open_terminal(color)
    stdout = None if terminal is not None and terminal.stdout_shared else Stdout(sys.stdout)
    stats = RequestStats()
    failure: GgpipeError | None = None
    display = LiveDisplay(terminal, ranks.ranks, lambda: ranks.is_loading)

    def write(text: str) -> None:
        nonlocal stdout, failure
        try:
            if stdout is not None and not stdout.write(text, ranks.is_ending):
                ranks.stop()  # the reader has left
        except RunError as e:
            stdout, failure = None, e
            ranks.stop()

    def show_pieces(pieces: Iterable[Piece], style: Style | None = None) -> None:
        for piece in pieces:
            if piece.is_reasoning:
                display.aside(piece.text)
            else:
                display.text(piece.text, style)

    try:
        display.loading()
        engine = ranks.load()
        for warning in (*warnings, *engine.warnings):
            warn(warning)
        started = engine.begin(structs.replace(request.spec, sampling=request.sampling(engine.sampling)), stats)
        for warning in started.accepted.warnings if started.accepted is not None else ():
            warn(warning)
        marks = started.answer_format
        parser = ReasoningParser(marks.reasoning) if marks is not None else None
        display.request(stats)
        if output.display_prompt:
            display.prompt(request.text)
        for token in engine.tokens(started):
            write(token.text)
            style = origin_style(token.drafters)
            if marks is None or parser is None:
                show_pieces([Piece(token.text, False)], style)
            else:
                show_pieces(parser.feed(marks.text_of(token.id, token.text)), style)
        write(started.rest)
        show_pieces([Piece(started.rest, False)] if parser is None else [*parser.feed(started.rest), *parser.finish()])
        for line in started.ended.not_saved if started.ended is not None else ():
            warn(line)
        engine.measure()
        if output.trace is not None:
            engine.align_clocks()
    except GgpipeError as e:
        if not stats.token_times:
            raise
        failure = e  # show what was generated, and its figures
        print_past_mpirun(e)
    finally:
        display.stop()
    now = time.monotonic()
    if stdout is not None and failure is None:
        stdout.end_line()
    print_summary(terminal, stats, ranks.ranks, now)
    if output.csv is not None:
        append_csv(output.csv, stats)
    if output.json is not None:
        write_json(output.json, request_object(stats, ranks.ranks), indent=2)
    if output.trace is not None:
        write_trace(output.trace, stats, ranks.ranks)
    if stats.finish is Finish.CONTEXT_FULL:
        show(Wording(f"the context of {engine.n_ctx} tokens is full: raise ", Setting("n_ctx"), " for longer outputs"))
    if stats.finish is Finish.NO_TOKEN:
        show(Wording("the output ends here: no token of the model's vocabulary matches ", Setting("grammar")))
    if failure is not None:
        raise failure
    return engine, stats

"""`ggpipe demo`: the bundled models write a tale with speculation, then a part of it without."""

from __future__ import annotations

from dataclasses import replace

from ggpipe.channel.client import StartedRanks
from ggpipe.cli.commands.generate import GenerateRequest, ServedRequest, answer, request_of
from ggpipe.cli.launching import run_command
from ggpipe.core.request import Finish
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import Color, open_terminal
from ggpipe.display.progress import FileProgress
from ggpipe.display.tables.comparison import comparison, print_sentences
from ggpipe.launch.environment import has_user
from ggpipe.llama.bundled import BUNDLED_PAIR, ModelPair, inflated_pair
from ggpipe.options.engine_config import engine_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    DemoSettings,
    GenerateOutput,
    ModelSettings,
    PromptSettings,
)
from ggpipe.stats.records import RequestStats

_OPENING = "In olden times, when wishing still helped one, there lived a king whose daughters were all beautiful."
_COMPARED_TOKENS = 24
_SETTLE_S = 0.1  # the drafter ends what it has begun
_INFLATED = (
    "A tale by the bundled models, inflated with zeros: the text of small models, the computing of large ones "
    "(413 and 7 million parameters)."
)
_TINY = "A tale by the bundled models. They are so small that messages between ranks take longer than computing."
_LEGEND = "Green: draft tokens that the target model accepted."


def run(options: Options) -> int:
    """Make the models, then start the ranks, or be one of them; the exit code."""
    output, tiny = options[GenerateOutput], options[DemoSettings].tiny
    pair = BUNDLED_PAIR if tiny else _inflated(output.color)
    options = options.having(ModelSettings(pair.target, (pair.draft,)))
    if options[PromptSettings].text is None and options[PromptSettings].file is None:
        options = options.having(replace(options[PromptSettings], text=_OPENING))
    config = replace(engine_config(options), cache_prompt=True)  # the prompt comes twice
    request = request_of(options)

    def front_end(ranks: StartedRanks) -> int:
        terminal = open_terminal(output.color)
        print_sentences(terminal, (_TINY if tiny else _INFLATED, *([_LEGEND] if terminal is not None else []), ""))
        drafted = answer(ranks, request, output, warnings_of(options))
        if drafted.stats.speculation.mode != "iterative" and drafted.stats.finish is not Finish.STOPPED:
            alone = _without_draft(drafted, request, output.color)
            print_sentences(terminal, ("", *comparison(ranks.ranks, drafted.stats, alone)), "bold")
        return 0

    return run_command(config, options, front_end, demo="tiny" if tiny else "inflated")


def _inflated(color: Color) -> ModelPair:
    """The inflated models; makes them with a progress bar, or on a rank that is not the front end, in silence."""
    if not has_user():
        return inflated_pair()
    with FileProgress(open_terminal(color), "Inflating the bundled models, once") as progress:
        return inflated_pair(progress)


def _without_draft(drafted: ServedRequest, request: GenerateRequest, color: Color) -> RequestStats:
    """The beginning of the same text, one token after the other; it is shown on a terminal only."""
    engine, n_tokens = drafted.engine, min(drafted.stats.n_generated, _COMPARED_TOKENS)
    engine.idle(_SETTLE_S)
    terminal, stats = open_terminal(color), RequestStats()
    print_sentences(terminal, ("", "Again, without the draft model:"))
    display = LiveDisplay(terminal, engine.ranks) if terminal is not None else None
    try:
        if display:
            display.request(stats)
        iterative = replace(request.speculation, mode="iterative")
        again = replace(request, n_predict=n_tokens, speculation=iterative)
        for token in engine.stream(again.spec(engine.sampling), stats):
            if display:
                display.text(token.text)
    finally:
        if display:
            display.stop()
    return stats

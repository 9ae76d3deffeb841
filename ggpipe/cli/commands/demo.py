"""`ggpipe demo`: the bundled models write a tale with a draft model, then part of it without."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from ggpipe.channel.client import EngineClient, StartedRanks
from ggpipe.cli.commands.generate import GenerateRequest, answer, request_of
from ggpipe.cli.launching import run_command
from ggpipe.core.request import Finish
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.progress import FileProgress
from ggpipe.display.tables.comparison import comparison, print_sentences
from ggpipe.launch.environment import has_user
from ggpipe.llama.bundled import BUNDLED_PAIR, ModelPair, inflated_pair
from ggpipe.options.engine_config import engine_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    Color,
    DemoSettings,
    DisplaySettings,
    GenerateOutput,
    ModelSettings,
    PromptSettings,
)
from ggpipe.stats.records import RequestStats

_OPENING = "In olden times, when wishing still helped one, there lived a king whose daughters were all beautiful."
_COMPARED_TOKENS = 24
_SETTLE_S = 0.1  # for the drafter to finish
_INFLATED = (
    "A tale by the bundled models, inflated with zeros: they write like small models, and compute like large ones "
    "(413 and 7 million parameters)."
)
_TINY = "A tale by the bundled models. They are so small that messages between ranks take longer than computing."
_LEGEND = "Green: draft tokens that the target model accepted."


def run(options: Options) -> int:
    """Make the models, and start the ranks or be one of them. Returns the exit code."""
    color, tiny = options[DisplaySettings].color, options[DemoSettings].tiny
    pair = BUNDLED_PAIR if tiny else _inflated(color)
    options = options.having(ModelSettings(pair.target, (pair.draft,)))
    if options[PromptSettings].text is None and options[PromptSettings].file is None:
        options = options.having(replace(options[PromptSettings], text=_OPENING))
    config = replace(engine_config(options), cache_prompt=True)  # the prompt is used twice
    request = request_of(options)

    def front_end(ranks: StartedRanks) -> int:
        terminal = open_terminal(color)
        print_sentences(terminal, (_TINY if tiny else _INFLATED, *([_LEGEND] if terminal is not None else []), ""))
        engine, drafted = answer(ranks, request, options[GenerateOutput], color, warnings_of(options))
        if drafted.speculation.mode != "iterative" and drafted.finish is not Finish.STOPPED:
            alone = _without_draft(engine, min(drafted.n_generated, _COMPARED_TOKENS), request, color)
            print_sentences(terminal, ("", *comparison(ranks.ranks, drafted, alone)), "bold")
        return 0

    return run_command(config, options, front_end, demo="tiny" if tiny else "inflated")


def _inflated(color: Color) -> ModelPair:
    """The inflated models. Making them shows a progress bar in the front end, and nothing on other ranks."""
    if not has_user():
        return inflated_pair()
    with FileProgress(open_terminal(color), "Inflating the bundled models (once)") as progress:
        return inflated_pair(progress)


def _without_draft(engine: EngineClient, n_tokens: int, request: GenerateRequest, color: Color) -> RequestStats:
    """Generate the first tokens again without a draft model. They are shown only on a terminal."""
    engine.idle(_SETTLE_S)
    terminal, stats = open_terminal(color), RequestStats()
    print_sentences(terminal, ("", "Again, without the draft model:"))
    iterative = replace(request.spec.speculation, mode="iterative")
    sampling = request.sampling(engine.sampling)
    spec = structs.replace(request.spec, n_predict=n_tokens, speculation=iterative, sampling=sampling)
    with LiveDisplay(terminal, engine.ranks) as display:
        display.request(stats)
        for token in engine.stream(spec, stats):
            display.text(token.text)
    return stats

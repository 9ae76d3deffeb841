"""`ggpipe demo`: the bundled models write a tale with a draft model, then its beginning with and without it in turn."""

from __future__ import annotations

import statistics
from dataclasses import replace

from msgspec import structs

from ggpipe.channel.client import EngineClient, StartedRanks
from ggpipe.cli.commands.generate import GenerateRequest, answer, request_of
from ggpipe.cli.launching import run_command
from ggpipe.core.request import Finish
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.origins import origin_style
from ggpipe.display.progress import FileProgress
from ggpipe.display.tables.comparison import ComparedRound, comparison, print_sentences
from ggpipe.launch.cpu_load import busy_share
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

_OPENING = "A cat met a fox in the forest, and thought to herself that he was clever."
_COMPARED_TOKENS = 12
_ROUNDS = 2
_SETTLE_S = 0.1  # for the drafter to finish
_LOOK_S = 0.1  # for a look at how busy the machine is while the ranks are idle
_INFLATED = (
    "A tale by the bundled models, inflated with zeros: they write like small models, and compute like large ones "
    "(413 and 14 million parameters)."
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
    config = engine_config(options)  # without a prompt cache, from which n-grams would know the tale
    request = request_of(options)

    def front_end(ranks: StartedRanks) -> int:
        terminal = open_terminal(color)
        print_sentences(terminal, (_TINY if tiny else _INFLATED, *([_LEGEND] if terminal is not None else []), ""))
        engine, drafted = answer(ranks, request, options[GenerateOutput], color, warnings_of(options))
        if drafted.speculation.mode != "iterative" and drafted.finish is not Finish.STOPPED:
            rounds, busy = _compared(engine, min(drafted.n_generated, _COMPARED_TOKENS), request, color)
            print_sentences(terminal, ("", *comparison(ranks.ranks, rounds, busy)), "bold")
        return 0

    return run_command(config, options, front_end, demo="tiny" if tiny else "inflated")


def _inflated(color: Color) -> ModelPair:
    """The inflated models. Making them shows a progress bar in the front end, and nothing on other ranks."""
    if not has_user():
        return inflated_pair()
    with FileProgress(open_terminal(color), "Inflating the bundled models (once)") as progress:
        return inflated_pair(progress)


def _compared(
    engine: EngineClient, n_tokens: int, request: GenerateRequest, color: Color
) -> tuple[list[ComparedRound], float]:
    """Generate the first tokens again without the draft model and with it, in turn, until the user stops it. Returns
    the rounds, and the share of the processors that other programs used. They are shown only on a terminal."""
    terminal = open_terminal(color)
    print_sentences(terminal, ("", "Again, without the draft model and with it, in turn:"))
    iterative = replace(request.spec.speculation, mode="iterative")
    sampling = request.sampling(engine.sampling)
    rounds: list[ComparedRound] = []
    busy: list[float] = []
    for number in range(_ROUNDS):
        engine.idle(_SETTLE_S)
        busy.append(busy_share(_LOOK_S))
        found: dict[bool, RequestStats] = {}
        for drafts in (False, True) if number % 2 == 0 else (True, False):
            speculation = request.spec.speculation if drafts else iterative
            spec = structs.replace(request.spec, n_predict=n_tokens, speculation=speculation, sampling=sampling)
            stats = found[drafts] = RequestStats()
            with LiveDisplay(terminal, engine.ranks) as display:
                display.request(stats)
                for token in engine.stream(spec, stats):
                    display.text(token.text, origin_style(token.drafters))
            if stats.finish is Finish.STOPPED:
                return rounds, statistics.median(busy)
            engine.idle(_SETTLE_S)
        rounds.append(ComparedRound(drafted=found[True], alone=found[False]))
    return rounds, statistics.median(busy)

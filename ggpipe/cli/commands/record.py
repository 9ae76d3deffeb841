"""`ggpipe record`: a draft model's candidates for each token of the target's text, for simulations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ggpipe.cli.engine_config import engine_config
from ggpipe.cli.launching import run_this_rank, start_ranks
from ggpipe.cli.messages import warn
from ggpipe.cli.parsing import Options
from ggpipe.cli.settings import (
    Log,
    Prompt,
    Ranks,
    RecordSettings,
)
from ggpipe.cluster.recording import dump
from ggpipe.config import SamplingConfig
from ggpipe.display.files import check_writable, write_text
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.stdout import Stdout
from ggpipe.display.tables.recording import recording_text
from ggpipe.errors import SettingError, UsageError
from ggpipe.measure.record import RecordSpec, WrittenText, banned_tokens, check_pair, record_draft, write_texts
from ggpipe.runtime.head import Head
from ggpipe.runtime.session import Session


def run(options: Options) -> int:
    """Start the ranks, or be one of them; the exit code."""
    config, prompt, settings = engine_config(options), options[Prompt], options[RecordSettings]
    if config.draft is None:
        raise UsageError("record needs a draft model: name one with `draft.model`")
    if config.draft.shares:
        raise UsageError("record runs the draft inside the first rank: leave out the / of `shares`")
    if prompt.n_predict == 0:
        raise SettingError("`n_predict` must be 1 or more, or -1 (all that fits), got 0")
    prompts = [replace(prompt, file=file, text=None) for file in settings.files]
    if prompt.text is not None or not prompts:
        prompts.append(prompt)
    target = replace(config, draft=None)
    spec = RecordSpec(
        target=target,
        draft=config.draft,
        prompts=[("-p" if prompt.file is None else prompt.file.name, prompt.read()) for prompt in prompts],
        sampling=options[SamplingConfig],
        n_predict=prompt.n_predict,
        n_candidates=settings.candidates,
    )
    code = start_ranks(target, options[Ranks].hostfile)
    if code is not None:
        return code
    return run_this_rank(target, _head(spec, settings.output), options[Log].verbose)


def _head(spec: RecordSpec, output: Path) -> Callable[[Head], int]:
    def head(ranks: Head) -> int:
        check_writable(output)
        vocabularies = check_pair(spec.target.model, spec.draft.model)
        written, seed, banned = _write_texts(ranks, spec)
        recording = record_draft(spec, written, seed, vocabularies, banned)
        write_text(output, dump(recording))
        Stdout(sys.stdout).write(recording_text(recording), ranks.is_ending)
        return 0

    return head


def _write_texts(ranks: Head, spec: RecordSpec) -> tuple[list[WrittenText], int, tuple[int, ...]]:
    """Load, and have the target write, on the live display. Returns the texts, their seed and the tokens that are never
    sampled."""
    terminal = open_terminal("auto")
    display = LiveDisplay(terminal, ranks.ranks) if terminal is not None else None
    try:
        if display is not None:
            display.loading()
        session = Session.load(ranks)
        for warning in session.warnings:
            warn(warning)
        if display is not None:
            written, seed = write_texts(session, spec, display.request, display.text, warn)
        else:
            written, seed = write_texts(session, spec, warn=warn)
        return written, seed, banned_tokens(session, spec.sampling)
    finally:
        if display is not None:
            display.stop()

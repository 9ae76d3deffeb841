"""`ggpipe record`: a draft model's candidates for each token of the target's output, for simulations."""

from __future__ import annotations

import functools
import sys
from dataclasses import replace
from pathlib import Path

from ggpipe.channel.client import StartedRanks
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import warn
from ggpipe.cluster.recording import dump
from ggpipe.display.files import check_writable, write_text
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.stdout import Stdout
from ggpipe.display.tables.recording import recording_text
from ggpipe.errors import Setting, SettingError, UsageError
from ggpipe.llama import libllama
from ggpipe.options.engine_config import engine_config
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import (
    LogSettings,
    ModelSettings,
    PromptSettings,
    RecordSettings,
)
from ggpipe.profiling.record import RecordSpec, WrittenText, check_pair, record_draft, write_texts


def run(options: Options) -> int:
    """Start the ranks, or be one of them. Returns the exit code."""
    config, prompt, settings = engine_config(options), options[PromptSettings], options[RecordSettings]
    if options[ModelSettings].the_draft is None:
        raise UsageError("record needs a draft model: name one with ", Setting("draft.model"))
    (draft,) = config.drafts
    if draft.layer_split is not None:
        raise UsageError("record runs the draft model inside the first rank: omit the / in ", Setting("layer_split"))
    if prompt.n_predict == 0:
        raise SettingError("n_predict", "must be -1 (no limit) or a number of tokens, 1 or more, got 0")
    prompts = [replace(prompt, file=file, text=None) for file in settings.files]
    if prompt.text is not None or not prompts:
        prompts.append(prompt)
    target = replace(config, drafts=())

    @functools.cache
    def spec() -> RecordSpec:
        return RecordSpec(
            target=target,
            draft=draft,
            prompts=[("-p" if prompt.file is None else prompt.file.name, prompt.read()) for prompt in prompts],
            sampling=sampling_config(options),
            n_predict=prompt.n_predict,
            n_candidates=settings.candidates,
        )

    def front_end(ranks: StartedRanks) -> int:
        return _record(ranks, spec(), functools.partial(sampling_config, options), settings.output)

    libllama.set_log_level(2 if options[LogSettings].verbose else 5)
    return run_command(target, options, front_end, prepare=spec)


def _record(ranks: StartedRanks, spec: RecordSpec, sampling: SamplingOf, output: Path) -> int:
    check_writable(output)
    pair = check_pair(spec.target.model, spec.draft.model, spec.sampling)
    spec, written, seed = _write_texts(ranks, spec, sampling)
    recording = record_draft(spec, written, seed, pair)
    write_text(output, dump(recording))
    Stdout(sys.stdout).write(recording_text(recording), ranks.is_ending)
    return 0


def _write_texts(
    ranks: StartedRanks, spec: RecordSpec, sampling: SamplingOf
) -> tuple[RecordSpec, list[WrittenText], int]:
    """Load the models and let the target generate, on the live display. Returns the spec with the sampling settings
    used, the outputs, and their seed."""
    with LiveDisplay(open_terminal("auto"), ranks.ranks, lambda: ranks.is_loading) as display:
        display.loading()
        engine = ranks.load()
        for warning in engine.warnings:
            warn(warning)
        spec = replace(spec, sampling=sampling(engine.sampling))
        return spec, *write_texts(engine, spec, display.request, display.text, warn)

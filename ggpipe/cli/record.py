"""`ggpipe record`: what a draft model thinks of the target's text, for simulations."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ggpipe.cli.flags import (
    OUTPUT,
    PROMPT,
    ComputeFlags,
    DraftFlags,
    LogFlags,
    ModelFlags,
    PromptFlags,
    RankFlags,
    SamplingFlags,
    option,
    takes_flags,
)
from ggpipe.cli.ranks import run_this_rank, start_ranks
from ggpipe.cli.settings import engine_config, read_prompt, sampling_config
from ggpipe.config import DraftConfig, EngineConfig, SamplingConfig, SpeculationConfig
from ggpipe.core.events import Finish
from ggpipe.display.files import check_writable, write_text
from ggpipe.display.live import LiveDisplay
from ggpipe.display.terminal import open_terminal
from ggpipe.display.wording import percent
from ggpipe.errors import RunError, UsageError

if TYPE_CHECKING:
    from ggpipe.runtime.session import Session
    from ggpipe.sim.recording import Recording

_MOST_CANDIDATES = 100
_BINS = 5


@takes_flags(leave_out=("file",), n_predict=256)
def record(
    model: ModelFlags,
    draft: DraftFlags,
    prompt: PromptFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    sampling: SamplingFlags,
    log: LogFlags,
    output: Annotated[Path, option("-o", "--output", panel=OUTPUT, metavar="FILE", help="The recording, JSON.")],
    files: Annotated[
        list[Path] | None,
        option("-f", "--file", panel=PROMPT, metavar="FILE", help="Read a prompt from a file; may be repeated."),
    ] = None,
    candidates: Annotated[
        int, option("--candidates", panel=OUTPUT, metavar="N", help="Candidates of the draft that are kept.")
    ] = 8,
) -> int:
    """Record what a draft model thinks of each token of the target's text, for `ggpipe simulate`.

    The target alone writes the text, on as many ranks as --mpi-layer-split names. The draft reads it in the first rank.
    """
    config = engine_config(model, compute, ranks, draft)
    if config.draft is None:
        raise UsageError("record needs a draft model to hear what it thinks: name one with -md")
    if config.draft.shares:
        raise UsageError("record runs the draft inside the first rank: leave out the / of --mpi-layer-split")
    if not 2 <= candidates <= _MOST_CANDIDATES:
        raise UsageError(f"--candidates is between 2 and {_MOST_CANDIDATES}; {candidates} is not")
    if prompt.n_predict == 0:
        raise UsageError("record needs a text: -n is 1 or more, or -1 for all that fits")
    prompts = [replace(prompt, file=file, prompt=None) for file in files or ()]
    if prompt.prompt is not None or not prompts:
        prompts.append(prompt)
    texts = [("-p" if flags.file is None else flags.file.name, read_prompt(flags)) for flags in prompts]
    target = replace(config, draft=None)
    code = start_ranks(target, ranks.hostfile)
    if code is not None:
        return code
    work = _Work(config.draft, texts, sampling_config(sampling), prompt.n_predict, candidates, output)
    return run_this_rank(target, _head(target, work), log.verbose)


@dataclass(frozen=True)
class _Work:
    draft: DraftConfig
    prompts: Sequence[tuple[str, str]]
    """Names and texts."""
    sampling: SamplingConfig
    n_predict: int
    n_candidates: int
    output: Path


def _head(config: EngineConfig, work: _Work) -> Callable[[Session], int]:
    def head(session: Session) -> int:
        from ggpipe.engine import machine
        from ggpipe.engine.model_file import ModelFile
        from ggpipe.runtime.recording import DraftReader, banned_tokens, check_pair
        from ggpipe.sim.recording import ModelName, Recording, Take, dump

        check_writable(work.output)
        meaningless = check_pair(config.model, work.draft.model)
        written, seed = _write_texts(session, work)
        n_tokens = max(len(prompt) + len(text) for _, prompt, text in written)
        threads = _threads(config, work.draft, machine.cores())
        banned = (*banned_tokens(session, work.sampling), *meaningless)
        takes = []
        with DraftReader(work.draft, n_tokens, threads, banned) as reader:
            for name, prompt, text in written:
                opinion = reader.read(prompt, text, work.n_candidates)
                takes.append(Take(name, prompt, text, opinion.candidates, opinion.astray))
        target, draft = (
            ModelName(part.model.path.name, ModelFile.open(part.model.path).fingerprint)
            for part in (config, work.draft)
        )
        sampling = {name: value for name, value in asdict(work.sampling).items() if name != "seed"}
        recording = Recording(target, draft, seed, sampling, tuple(takes))
        write_text(work.output, dump(recording))
        _tell(recording)
        return 0

    return head


def _threads(config: EngineConfig, draft: DraftConfig, cores: int) -> tuple[int, int]:
    """The draft's, for single tokens and for batches: the target has written its text, so all cores are free."""
    single, batch = config.pipeline.threads_of(0, cores)
    if draft.threads > 0:
        single = batch = draft.threads
    return single, batch if draft.threads_batch < 0 else draft.threads_batch


def _write_texts(session: Session, work: _Work) -> tuple[list[tuple[str, tuple[int, ...], tuple[int, ...]]], int]:
    """Names, prompts and the target's texts after them, and the seed of all; fewer of them when the user stops it."""
    from ggpipe.runtime.stats import RequestStats

    terminal = open_terminal("auto")
    display = LiveDisplay(terminal, session.ranks) if terminal is not None else None
    sampling, written, finish = work.sampling, [], None
    try:
        if display:
            display.loading()
        session.load()
        for warning in session.warnings:
            print(f"ggpipe: warning: {warning}", file=sys.stderr)
        prompts = [session.vocab.tokenize(text) for _, text in work.prompts]
        for prompt in prompts:
            session.check_prompt(prompt)
        for (name, _), prompt in zip(work.prompts, prompts, strict=True):
            stats = RequestStats()
            if display:
                display.request(stats)
            text = []
            for token in session.generate(prompt, sampling, work.n_predict, stats, SpeculationConfig("iterative")):
                text += [token.id] if token.id >= 0 else []
                if display:
                    display.text(token.text)
            if display:
                display.text("\n")
            sampling, finish = replace(sampling, seed=stats.seed), stats.finish
            if text:
                written.append((name, prompt, tuple(text)))
            elif finish != Finish.STOPPED.value:
                raise UsageError(f"the text after {name} ends at once: try --ignore-eos, or another prompt")
            if finish == Finish.STOPPED.value:
                break
    finally:
        if display:
            display.stop()
    if not written:
        raise RunError("stopped before there was any text to record")
    if finish == Finish.STOPPED.value:
        print("ggpipe: warning: stopped; what was written so far is recorded", file=sys.stderr)
    return written, sampling.seed


def _tell(recording: Recording) -> None:
    """A line for each prompt; then how often the draft was right, by how sure it was."""
    width = max(len(name) for name in ("confidence", *(take.name for take in recording.takes)))
    for take in recording.takes:
        print(
            f"{take.name:{width}}  {len(take.text)} tokens  agreement {_mean(take.right)}  "
            f"confidence {_mean(take.confidence)}"
        )
    bins: list[list[bool]] = [[] for _ in range(_BINS)]
    for take in recording.takes:
        for is_right, confidence in zip(take.right, take.confidence, strict=True):
            bins[min(int(confidence * _BINS), _BINS - 1)].append(is_right)
    step = 100 // _BINS
    for title, cells in (
        ("confidence", [f"{i * step}-{(i + 1) * step} %" for i in range(_BINS)]),
        ("agreement", [_mean(right) for right in bins]),
        ("tokens", [f"{len(right)}" for right in bins]),
    ):
        print(f"{title:{width}}", *(f"{cell:>8}" for cell in cells))


def _mean(values: Sequence[float]) -> str:
    return percent(sum(values) / len(values)) if values else "-"

"""`ggpipe generate`: continue a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

from ggpipe.cli.flags import (
    OUTPUT,
    ComputeFlags,
    DraftFlags,
    LogFlags,
    ModelFlags,
    PromptFlags,
    RankFlags,
    SamplingFlags,
    SpeculationFlags,
    check_on_off_auto,
    option,
    takes_flags,
)
from ggpipe.cli.ranks import run_this_rank, start_ranks
from ggpipe.cli.settings import engine_config, read_prompt, sampling_config, speculation_config, warnings_of
from ggpipe.config import SamplingConfig, SpeculationConfig
from ggpipe.core.events import Finish
from ggpipe.display.files import check_writable
from ggpipe.display.live import LiveDisplay
from ggpipe.display.panel import origin_style
from ggpipe.display.summary import append_csv, print_summary, write_json
from ggpipe.display.terminal import open_answer, open_terminal
from ggpipe.display.trace import write_trace
from ggpipe.errors import GgpipeError

if TYPE_CHECKING:
    from ggpipe.runtime.session import Session


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """What is shown, and what is written to files."""

    # fmt: off
    color: Annotated[str, option("--color", panel=OUTPUT, metavar="on|off|auto", help="Live display and colour; off: no colour.")] = "auto"
    display_prompt: Annotated[bool, option("--display-prompt/--no-display-prompt", panel=OUTPUT, help="Show the prompt in the live display.")] = True
    csv: Annotated[Path | None, option("--csv", panel=OUTPUT, metavar="FILE", help="Append prefill t/s, decode t/s, ITL s, TTFT s.")] = None
    json: Annotated[Path | None, option("--json", panel=OUTPUT, metavar="FILE", help="Write all measurements.")] = None
    trace: Annotated[Path | None, option("--trace", panel=OUTPUT, metavar="FILE", help="Write a timeline of all ranks, for Perfetto or chrome://tracing.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        check_on_off_auto(self.color)


@takes_flags()
def generate(
    model: ModelFlags,
    prompt: PromptFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    speculation: SpeculationFlags,
    sampling: SamplingFlags,
    output: OutputFlags,
    log: LogFlags,
) -> int:
    """Continue a prompt with a model whose layers are spread over ranks.

    Works under mpirun or srun, alone with --mpi-layer-split (mpirun is started for you), and on one rank without MPI.
    The text goes to stdout, everything else to stderr.
    """
    config = engine_config(model, compute, ranks, draft, speculation)
    request = _Request(
        read_prompt(prompt),
        sampling_config(sampling),
        prompt.n_predict,
        speculation_config(speculation, compute.exact),
    )
    code = start_ranks(config, ranks.hostfile)
    if code is not None:
        return code
    head = _head(request, output, warnings_of(compute, draft, speculation))
    return run_this_rank(config, head, log.verbose)


@dataclass(frozen=True)
class _Request:
    text: str
    sampling: SamplingConfig
    n_predict: int
    speculation: SpeculationConfig


def _head(request: _Request, output: OutputFlags, warnings: Sequence[str]) -> Callable[[Session], int]:
    def head(session: Session) -> int:
        import time

        from ggpipe.runtime.stats import RequestStats

        for path in (output.csv, output.json, output.trace):
            if path is not None:
                check_writable(path)
        terminal = open_terminal(output.color)  # type: ignore[arg-type]
        answer = None if terminal is not None and terminal.stdout_shared else open_answer()
        stats = RequestStats()
        failure: GgpipeError | None = None
        display = LiveDisplay(terminal, session.ranks) if terminal is not None else None
        try:
            if display:
                display.loading()
            session.load()
            for warning in (*warnings, *session.warnings):
                print(f"ggpipe: warning: {warning}", file=sys.stderr)
            prompt = session.vocab.tokenize(request.text)
            session.check_prompt(prompt)
            if display:
                display.request(stats)
                if output.display_prompt:
                    display.prompt(request.text)
            tokens = session.generate(prompt, request.sampling, request.n_predict, stats, request.speculation)
            for token in tokens:
                if answer is not None:
                    _write(answer, token.text, session)
                if display:
                    display.text(token.text, origin_style(token.guessed))
            session.measure()
            if output.trace is not None:
                session.align_clocks()
        except GgpipeError as e:
            if not stats.token_times:
                raise
            failure = e  # what was generated stays, and is summed up
        finally:
            if display:
                display.stop()
        now = time.monotonic()
        print_summary(terminal, stats, session.ranks, now)
        if output.csv is not None:
            append_csv(output.csv, stats)
        if output.json is not None:
            write_json(output.json, stats, session.ranks, {})
        if output.trace is not None:
            write_trace(output.trace, stats, session.ranks)
        if stats.finish == Finish.CONTEXT_FULL.value:
            print(f"ggpipe: the context of {session.n_ctx} tokens is full; raise -c for a longer text", file=sys.stderr)
        if failure is not None:
            raise failure
        return 0

    return head


def _write(answer: TextIO, text: str, session: Session) -> None:
    try:
        answer.write(text)
        answer.flush()
    except BrokenPipeError:  # the reader has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), answer.fileno())
        session.stop()

"""`ggpipe generate`: continue a prompt."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO, cast, get_args

import typer

from ggpipe.cli.arguments import unescape
from ggpipe.config import (
    ContextConfig,
    DraftConfig,
    EngineConfig,
    LoadMode,
    Mode,
    ModelConfig,
    Numa,
    PipelineConfig,
    SamplingConfig,
    SpeculationConfig,
)
from ggpipe.core.events import Finish
from ggpipe.core.layout import parse_shares
from ggpipe.display.files import check_writable
from ggpipe.display.live import LiveDisplay
from ggpipe.display.panel import origin_style
from ggpipe.display.summary import append_csv, print_summary, write_json
from ggpipe.display.terminal import launcher_environment, open_answer, open_terminal, restore_terminal
from ggpipe.display.trace import write_trace
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.runtime import launch

if TYPE_CHECKING:
    from ggpipe.runtime.session import Session

_CONTEXT, _SAMPLING, _SPECULATION = ContextConfig(), SamplingConfig(), SpeculationConfig()
_PROMPT, _MODEL, _RANKS, _DRAFT, _COMPUTE, _SAMPLE, _ROPE, _OUTPUT = (
    "Prompt", "Model", "Ranks", "Speculation", "Compute", "Sampling", "RoPE and YaRN", "Output",
)  # fmt: skip


def _option(*names: str, panel: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)
    return option


@dataclass(frozen=True)
class _Output:
    color: str
    csv: Path | None
    json: Path | None
    trace: Path | None
    show_prompt: bool


def generate(
    model: Annotated[Path, _option("-m", "--model", panel=_MODEL, metavar="FILE", help="The GGUF file; of a split one the first part.")],
    prompt: Annotated[str | None, _option("-p", "--prompt", panel=_PROMPT, metavar="TEXT", help="Text to continue.")] = None,
    file: Annotated[Path | None, _option("-f", "--file", panel=_PROMPT, metavar="FILE", help="Read the prompt from a file.")] = None,
    escape: Annotated[bool, _option("-e/ ", "--escape/--no-escape", panel=_PROMPT, help=r"Process \\n, \\t, \\xHH … in the prompt.")] = True,
    n_predict: Annotated[int, _option("-n", "--predict", "--n-predict", panel=_PROMPT, metavar="N", help="Tokens to generate; -1: until the text ends or the context is full.")] = -1,
    ctx_size: Annotated[int, _option("-c", "--ctx-size", panel=_COMPUTE, metavar="N", help="Context in tokens; 0: the model's own.")] = _CONTEXT.n_ctx,
    batch_size: Annotated[int, _option("-b", "--batch-size", panel=_COMPUTE, metavar="N", help="Prompt tokens in a batch.")] = _CONTEXT.n_batch,
    ubatch_size: Annotated[int, _option("-ub", "--ubatch-size", panel=_COMPUTE, metavar="N", help="Prompt tokens in a run: one run is in each stage.")] = _CONTEXT.n_ubatch,
    threads: Annotated[str, _option("-t", "--threads", panel=_COMPUTE, metavar="LIST", help="Threads; one value, or one for each rank (6,32,20). -1: the machine's cores.")] = "-1",
    threads_batch: Annotated[str, _option("-tb", "--threads-batch", panel=_COMPUTE, metavar="LIST", help="Threads for prompts; -1: as -t.")] = "-1",
    flash_attn: Annotated[str, _option("-fa", "--flash-attn", panel=_COMPUTE, metavar="on|off|auto", help="Flash attention.")] = _CONTEXT.flash_attn,
    cache_type_k: Annotated[str, _option("-ctk", "--cache-type-k", panel=_COMPUTE, metavar="TYPE", help="KV cache type of K.")] = _CONTEXT.cache_type_k,
    cache_type_v: Annotated[str, _option("-ctv", "--cache-type-v", panel=_COMPUTE, metavar="TYPE", help="KV cache type of V.")] = _CONTEXT.cache_type_v,
    exact: Annotated[bool, _option("--exact", panel=_COMPUTE, help="Reference kernels: the same bits for every split, mode and number of threads. Slower.")] = False,
    mpi_layer_split: Annotated[str | None, _option("--mpi-layer-split", panel=_RANKS, metavar="LIST", help="Share of the layers for each rank, head first (0.1,0.4,0.5). Without mpirun, that many ranks are started. Default: even.")] = None,
    model_draft: Annotated[Path | None, _option("-md", "--model-draft", "--spec-draft-model", panel=_DRAFT, metavar="FILE", help="A smaller model of the same family that guesses ahead. It runs on the ranks behind the / of --mpi-layer-split, else inside the first rank.")] = None,
    mode: Annotated[str | None, _option("--mode", panel=_DRAFT, metavar="MODE", help="async: drafting and verifying overlap (default with -md). speculative: draft, verify, repeat. iterative: no guesses.")] = None,
    draft: Annotated[int, _option("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max", panel=_DRAFT, metavar="N", help="Guesses in a micro-batch, at most.")] = _SPECULATION.n_draft,
    draft_min: Annotated[int, _option("--draft-min", "--spec-draft-n-min", panel=_DRAFT, metavar="N", help="Send no micro-batch with fewer guesses.")] = _SPECULATION.n_min,
    p_accept: Annotated[float, _option("-pa", "--p-accept", "--draft-p-min", "--spec-draft-p-min", panel=_DRAFT, metavar="P", help="Guess no further than the draft's probability of a token is this.")] = _SPECULATION.p_accept,
    p_split: Annotated[float, _option("-ps", "--p-split", "--draft-p-split", "--spec-draft-p-split", panel=_DRAFT, metavar="P", help="Split a branch for a further token with this probability.")] = _SPECULATION.p_split,
    p_recovery: Annotated[float, _option("-pr", "--p-recovery", panel=_DRAFT, metavar="P", help="Raise -pa and -ps by this for each micro-batch since the last accepted token.")] = _SPECULATION.p_recovery,
    p_decay: Annotated[float, _option("-pd", "--p-decay", panel=_DRAFT, metavar="P", help="Lower them by this for each attempt since then that found nothing.")] = _SPECULATION.p_decay,
    parallel: Annotated[int, _option("-np", "--parallel", panel=_DRAFT, metavar="N", help="Branches that are guessed side by side.")] = _SPECULATION.n_parallel,
    threads_draft: Annotated[int, _option("-td", "--threads-draft", panel=_DRAFT, metavar="N", help="Threads of the draft; -1: as -t.")] = -1,
    threads_batch_draft: Annotated[int, _option("-tbd", "--threads-batch-draft", panel=_DRAFT, metavar="N", help="Threads of the draft for prompts; -1: as -td.")] = -1,
    cancel: Annotated[bool, _option("--cancel/--no-cancel", panel=_DRAFT, help="Stop runs that turned out wrong while they are in flight.")] = True,
    continuous: Annotated[bool, _option("--continuous/--no-continuous", panel=_DRAFT, help="Guess on while guesses are in flight.")] = True,
    hostfile: Annotated[Path | None, _option("--hostfile", panel=_RANKS, metavar="FILE", help="Machines to start ranks on, as mpirun reads it.")] = None,
    load_mode: Annotated[str, _option("-lm", "--load-mode", panel=_MODEL, metavar="MODE", help="auto, none, mmap, mlock, mmap+mlock or dio.")] = "auto",
    mmap: Annotated[bool, _option("--mmap/--no-mmap", panel=_MODEL, help="Map weights from the file, or read this rank's layers into memory.")] = True,
    mlock: Annotated[bool, _option("--mlock", panel=_MODEL, help="Keep weights in RAM.")] = False,
    repack: Annotated[bool, _option("--repack/--no-repack", " /-nr", panel=_MODEL, help="Let ggml repack weights for this CPU.")] = True,
    numa: Annotated[str | None, _option("--numa", panel=_MODEL, metavar="TYPE", help="distribute (also when bare), isolate or numactl.")] = None,
    override_kv: Annotated[list[str] | None, _option("--override-kv", panel=_MODEL, metavar="KEY=TYPE:VALUE", help="Override metadata of the model.")] = None,
    lora: Annotated[list[str] | None, _option("--lora", panel=_MODEL, metavar="FILE", help="Apply a LoRA adapter.")] = None,
    lora_scaled: Annotated[list[str] | None, _option("--lora-scaled", panel=_MODEL, metavar="FILE:SCALE", help="Apply a LoRA adapter, scaled.")] = None,
    temp: Annotated[float, _option("--temp", "--temperature", panel=_SAMPLE, metavar="T", help="Temperature; 0 or less: greedy.")] = _SAMPLING.temp,
    top_k: Annotated[int, _option("--top-k", panel=_SAMPLE, metavar="N", help="Keep the N best; 0: all.")] = _SAMPLING.top_k,
    top_p: Annotated[float, _option("--top-p", panel=_SAMPLE, metavar="P", help="Keep the best that add up to P.")] = _SAMPLING.top_p,
    min_p: Annotated[float, _option("--min-p", panel=_SAMPLE, metavar="P", help="Keep what has at least P of the best's probability.")] = _SAMPLING.min_p,
    repeat_last_n: Annotated[int, _option("--repeat-last-n", panel=_SAMPLE, metavar="N", help="Tokens that penalties look back on; 0: off, -1: all.")] = _SAMPLING.repeat_last_n,
    repeat_penalty: Annotated[float, _option("--repeat-penalty", panel=_SAMPLE, metavar="X", help="Penalise repeated tokens; 1: off.")] = _SAMPLING.repeat_penalty,
    presence_penalty: Annotated[float, _option("--presence-penalty", panel=_SAMPLE, metavar="X", help="Penalise tokens that occurred; 0: off.")] = _SAMPLING.presence_penalty,
    frequency_penalty: Annotated[float, _option("--frequency-penalty", panel=_SAMPLE, metavar="X", help="Penalise tokens by how often they occurred; 0: off.")] = _SAMPLING.frequency_penalty,
    seed: Annotated[int, _option("-s", "--seed", panel=_SAMPLE, metavar="N", help="Seed; -1: random.")] = _SAMPLING.seed,
    ignore_eos: Annotated[bool, _option("--ignore-eos", panel=_SAMPLE, help="Never end the text before -n tokens.")] = False,
    rope_scaling: Annotated[str | None, _option("--rope-scaling", panel=_ROPE, metavar="KIND", help="none, linear or yarn. Default: the model's.")] = None,
    rope_scale: Annotated[float, _option("--rope-scale", panel=_ROPE, metavar="X", help="Stretch the context X times.")] = 0.0,
    rope_freq_base: Annotated[float, _option("--rope-freq-base", panel=_ROPE, metavar="X", help="Base frequency.")] = 0.0,
    rope_freq_scale: Annotated[float, _option("--rope-freq-scale", panel=_ROPE, metavar="X", help="Frequency scale: 1/X of --rope-scale.")] = 0.0,
    yarn_orig_ctx: Annotated[int, _option("--yarn-orig-ctx", panel=_ROPE, metavar="N", help="Context that the model was trained with.")] = 0,
    yarn_ext_factor: Annotated[float, _option("--yarn-ext-factor", panel=_ROPE, metavar="X", help="Extrapolation mix.")] = -1.0,
    yarn_attn_factor: Annotated[float, _option("--yarn-attn-factor", panel=_ROPE, metavar="X", help="Magnitude scale.")] = -1.0,
    yarn_beta_slow: Annotated[float, _option("--yarn-beta-slow", panel=_ROPE, metavar="X", help="High correction dimension.")] = -1.0,
    yarn_beta_fast: Annotated[float, _option("--yarn-beta-fast", panel=_ROPE, metavar="X", help="Low correction dimension.")] = -1.0,
    color: Annotated[str, _option("--color", panel=_OUTPUT, metavar="on|off|auto", help="Live display and colour; off: no colour.")] = "auto",
    display_prompt: Annotated[bool, _option("--display-prompt/--no-display-prompt", panel=_OUTPUT, help="Show the prompt in the live display.")] = True,
    csv: Annotated[Path | None, _option("--csv", panel=_OUTPUT, metavar="FILE", help="Append prefill t/s, decode t/s, ITL s, TTFT s.")] = None,
    json: Annotated[Path | None, _option("--json", panel=_OUTPUT, metavar="FILE", help="Write all measurements.")] = None,
    trace: Annotated[Path | None, _option("--trace", panel=_OUTPUT, metavar="FILE", help="Write a timeline of all ranks, for Perfetto or chrome://tracing.")] = None,
    verbose: Annotated[bool, _option("-v", "--verbose", panel=_OUTPUT, help="Show libllama's messages.")] = False,
) -> int:  # fmt: skip
    """Continue a prompt with a model whose layers are spread over ranks.

    Works under mpirun or srun, alone with --mpi-layer-split (mpirun is started for you), and on one rank without MPI.
    The text goes to stdout, everything else to stderr.
    """
    if seed < -1 or n_predict < -1:
        raise UsageError("-s and -n are numbers from 0 up, or -1")
    modes = {"auto": "mmap" if mmap else "none"} | {mode: mode for mode in get_args(LoadMode)}
    if load_mode not in modes:
        raise UsageError(f"--load-mode {load_mode}: known modes are auto, {', '.join(get_args(LoadMode))}")
    if numa is not None and numa not in get_args(Numa):
        raise UsageError(f"--numa {numa}: known strategies are {', '.join(get_args(Numa))}")
    if flash_attn not in ("on", "off", "auto") or color not in ("on", "off", "auto"):
        raise UsageError("-fa and --color take on, off or auto")
    if mode is not None and mode not in get_args(Mode):
        raise UsageError(f"--mode {mode}: known modes are {', '.join(get_args(Mode))}")
    if mode in ("async", "speculative") and model_draft is None:
        raise UsageError(f"--mode {mode} guesses with a draft model: name one with -md")
    loading = modes[load_mode]
    if mlock:
        loading = {"mmap": "mmap+mlock", "none": "mlock"}.get(loading, loading)
    shares, draft_shares = parse_shares(mpi_layer_split) if mpi_layer_split is not None else (None, ())
    if draft_shares and model_draft is None:
        raise UsageError(
            f"--mpi-layer-split {mpi_layer_split}: ranks behind the / run a draft model; name one with -md"
        )
    speculation = SpeculationConfig(
        cast(Mode, mode or _SPECULATION.mode), draft, min(draft_min, draft), p_accept, p_split, p_recovery, p_decay,
        1 if exact else parallel, cancel, continuous,
    )  # fmt: skip
    context = ContextConfig(
        ctx_size, batch_size, ubatch_size, speculation.n_parallel if model_draft else 1, cache_type_k, cache_type_v,
        flash_attn, exact, rope_scaling, rope_scale, rope_freq_base, rope_freq_scale, yarn_orig_ctx,  # type: ignore[arg-type]
        yarn_ext_factor, yarn_attn_factor, yarn_beta_fast, yarn_beta_slow,
    )  # fmt: skip
    draft_config = None
    if model_draft is not None:
        draft_model = ModelConfig(model_draft, cast(LoadMode, loading), repack, cast("Numa | None", numa))
        draft_context = ContextConfig(
            ctx_size, batch_size, ubatch_size, speculation.n_parallel, cache_type_k, cache_type_v, flash_attn  # type: ignore[arg-type]
        )  # fmt: skip
        draft_config = DraftConfig(draft_model, draft_context, draft_shares, threads_draft, threads_batch_draft)
    config = EngineConfig(
        ModelConfig(
            model, cast(LoadMode, loading), repack, cast("Numa | None", numa), tuple(override_kv or ()),
            _loras(lora or [], lora_scaled or []),
        ),
        context,
        PipelineConfig(shares, _per_rank("-t", threads), _per_rank("-tb", threads_batch)),
        draft_config,
    )  # fmt: skip
    sampling = SamplingConfig(
        temp,
        top_k,
        top_p,
        min_p,
        repeat_last_n,
        repeat_penalty,
        presence_penalty,
        frequency_penalty,
        seed,
        ignore_eos,
    )
    text = _read_prompt(prompt, file, escape)
    warnings = ["with --exact guesses are chains: -np 1 is used"] if exact and model_draft and parallel > 1 else []
    output = _Output(color, csv, json, trace, display_prompt)
    n_ranks = len(shares or ()) + len(draft_shares)
    if launch.rank_in_environment() is None and (hostfile is not None or n_ranks > 1):
        if shares is None:
            raise UsageError(
                "--hostfile needs --mpi-layer-split, which says how many ranks to start and what each gets"
            )
        code = launch.launch(sys.argv[1:], n_ranks, hostfile, launcher_environment())
        if code != 0:
            restore_terminal()
        return code
    return _run(config, _head(text, sampling, n_predict, speculation, output, warnings), verbose)


def _run(config: EngineConfig, head: Callable[[Session], int], verbose: bool) -> int:
    from ggpipe.engine import libllama
    from ggpipe.runtime.rank import run_rank

    libllama.set_log_level(2 if verbose else 5)
    return run_rank(config, head)


def _head(
    text: str,
    sampling: SamplingConfig,
    n_predict: int,
    speculation: SpeculationConfig,
    output: _Output,
    warnings: Sequence[str],
) -> Callable[[Session], int]:
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
            prompt = session.vocab.tokenize(text)
            session.check_prompt(prompt)
            if display:
                display.request(stats)
                if output.show_prompt:
                    display.prompt(text)
            for token in session.generate(prompt, sampling, n_predict, stats, speculation):
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


def _read_prompt(prompt: str | None, file: Path | None, escape: bool) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give one prompt: the text with -p, or a file with -f")
    if file is not None:
        try:
            prompt = file.read_bytes().decode("utf-8", "surrogateescape")
        except OSError as e:
            raise UsageError(f"cannot read the prompt file {file}: {e.strerror}") from e
        prompt = prompt.removesuffix("\n")  # as llama.cpp: editors end files with a newline that no prompt means
    assert prompt is not None
    return unescape(prompt) if escape else prompt


def _per_rank(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(value) for value in text.replace("/", ",").split(","))
    except ValueError:
        raise UsageError(f"{flag} {text}: give a number, or one for each rank as in 6,32,20") from None


def _loras(plain: list[str], scaled: list[str]) -> tuple[tuple[Path, float], ...]:
    loras = [(Path(path), 1.0) for path in plain]
    for item in scaled:
        path, colon, scale = item.rpartition(":")
        try:
            if not colon:
                raise ValueError
            loras.append((Path(path), float(scale)))
        except ValueError:
            raise UsageError(f"--lora-scaled {item}: write FILE:SCALE") from None
    return tuple(loras)

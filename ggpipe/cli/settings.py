"""From groups of flags (`cli/flags.py`) to settings (`config.py`).

All functions raise UsageError for values that make no sense, or do not fit together.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

from ggpipe.cli.arguments import unescape
from ggpipe.cli.flags import (
    ComputeFlags,
    DraftFlags,
    ModelFlags,
    OptionalModelFlags,
    PromptFlags,
    RankFlags,
    SamplingFlags,
    SpeculationFlags,
)
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
from ggpipe.core.layout import parse_shares
from ggpipe.errors import UsageError

AUTO = "auto"
"""A value of --mpi-layer-split."""
_DEFAULT_MODE = SpeculationConfig().mode
_COMPUTE, _RANKS, _DRAFT, _SPECULATION = ComputeFlags(), RankFlags(), DraftFlags(), SpeculationFlags()


def engine_config(
    model: ModelFlags,
    compute: ComputeFlags = _COMPUTE,
    ranks: RankFlags = _RANKS,
    draft: DraftFlags = _DRAFT,
    speculation: SpeculationFlags = _SPECULATION,
) -> EngineConfig:
    """All that a session is opened with. Leave out the groups that a command does not take."""
    if speculation.mode in ("async", "speculative") and draft.model_draft is None:
        raise UsageError(f"--mode {speculation.mode} guesses with a draft model: name one with -md")
    shares, draft_shares = shares_of(ranks, draft)
    n_parallel = speculation_config(speculation, compute.exact).n_parallel
    context = context_config(compute, n_parallel if draft.model_draft else 1)
    return EngineConfig(
        model_config(model),
        context,
        PipelineConfig(
            shares,
            per_rank("-t", compute.threads),
            per_rank("-tb", compute.threads_batch),
            auto=ranks.mpi_layer_split == AUTO,
        ),
        draft_config(model, compute, draft, draft_shares, n_parallel),
    )


def model_config(model: ModelFlags) -> ModelConfig:
    """The target model."""
    loras = _loras(model.lora or [], model.lora_scaled or [])
    return ModelConfig(
        model.model, _load_mode(model), model.repack, cast("Numa | None", model.numa), tuple(model.override_kv or ()),
        loras,
    )  # fmt: skip


def context_config(compute: ComputeFlags, n_seq: int = 1) -> ContextConfig:
    """The target's context. `n_seq`: sequence ids in use at the same time."""
    return ContextConfig(
        compute.ctx_size, compute.batch_size, compute.ubatch_size, n_seq, compute.cache_type_k, compute.cache_type_v,
        compute.flash_attn, compute.exact, compute.rope_scaling, compute.rope_scale, compute.rope_freq_base,  # type: ignore[arg-type]
        compute.rope_freq_scale, compute.yarn_orig_ctx, compute.yarn_ext_factor, compute.yarn_attn_factor,
        compute.yarn_beta_fast, compute.yarn_beta_slow,
    )  # fmt: skip


def draft_config(
    model: OptionalModelFlags,
    compute: ComputeFlags,
    draft: DraftFlags,
    shares: tuple[float, ...] = (),
    n_parallel: int = 1,
) -> DraftConfig | None:
    """The draft model; None without -md.

    It is loaded as the target is. Its context is as large, but positions, kernels and metadata are its own.
    """
    if draft.model_draft is None:
        return None
    config = ModelConfig(draft.model_draft, _load_mode(model), model.repack, cast("Numa | None", model.numa))
    context = ContextConfig(
        compute.ctx_size, compute.batch_size, compute.ubatch_size, n_parallel, compute.cache_type_k,
        compute.cache_type_v, compute.flash_attn,  # type: ignore[arg-type]
    )  # fmt: skip
    return DraftConfig(config, context, shares, draft.threads_draft, draft.threads_batch_draft)


def shares_of(ranks: RankFlags, draft: DraftFlags) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    """Shares of the layers for the target's ranks (None: even ones, or found out later) and for the draft's."""
    if ranks.mpi_layer_split in (None, AUTO):
        return None, ()
    shares, draft_shares = parse_shares(ranks.mpi_layer_split or "")
    if draft_shares and draft.model_draft is None:
        raise UsageError(
            f"--mpi-layer-split {ranks.mpi_layer_split}: ranks behind the / run a draft model; name one with -md"
        )
    return shares, draft_shares


def speculation_config(speculation: SpeculationFlags, exact: bool = False) -> SpeculationConfig:
    """How a draft model guesses ahead; with --exact (`exact`) guesses are chains."""
    return SpeculationConfig(
        cast(Mode, speculation.mode or _DEFAULT_MODE), speculation.draft, min(speculation.draft_min, speculation.draft),
        speculation.p_accept, speculation.p_split, speculation.p_recovery, speculation.p_decay,
        1 if exact else speculation.parallel, speculation.cancel, speculation.continuous,
    )  # fmt: skip


def warnings_of(compute: ComputeFlags, draft: DraftFlags, speculation: SpeculationFlags) -> list[str]:
    """What the user should know of flags that are not taken as given."""
    if compute.exact and draft.model_draft and speculation.parallel > 1:
        return ["with --exact guesses are chains: -np 1 is used"]
    return []


def sampling_config(sampling: SamplingFlags) -> SamplingConfig:
    """The sampler chain."""
    return SamplingConfig(
        sampling.temp, sampling.top_k, sampling.top_p, sampling.min_p, sampling.repeat_last_n, sampling.repeat_penalty,
        sampling.presence_penalty, sampling.frequency_penalty, sampling.seed, sampling.ignore_eos,
    )  # fmt: skip


def read_prompt(prompt: PromptFlags) -> str:
    """The text to continue; bytes that are no UTF-8 are surrogates in it."""
    text, file = prompt.prompt, prompt.file
    if (text is None) == (file is None):
        raise UsageError("give one prompt: the text with -p, or a file with -f")
    if file is not None:
        try:
            text = file.read_bytes().decode("utf-8", "surrogateescape")
        except OSError as e:
            raise UsageError(f"cannot read the prompt file {file}: {e.strerror}") from e
        text = text.removesuffix("\n")  # as llama.cpp: editors end files with a newline that no prompt means
    assert text is not None
    return unescape(text) if prompt.escape else text


def per_rank(flag: str, text: str) -> tuple[int, ...]:
    """A list of numbers, one for all ranks or one for each; `flag` is its option, for the message."""
    try:
        return tuple(int(value) for value in text.replace("/", ",").split(","))
    except ValueError:
        raise UsageError(f"{flag} {text}: give a number, or one for each rank as in 6,32,20") from None


def _load_mode(model: OptionalModelFlags) -> LoadMode:
    modes = {"auto": "mmap" if model.mmap else "none"} | {mode: mode for mode in get_args(LoadMode)}
    loading = modes[model.load_mode]
    if model.mlock:
        loading = {"mmap": "mmap+mlock", "none": "mlock"}.get(loading, loading)
    return cast(LoadMode, loading)


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

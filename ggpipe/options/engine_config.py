"""Makes the engine's config from the options of a command line.

All functions raise SettingError or UsageError for settings that contradict each other.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

from ggpipe.config.checks import check_range
from ggpipe.config.context import MAX_SEQUENCES, MAX_STATES, ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import THRESHOLDS, Mode, SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.options.option import Options
from ggpipe.options.settings import LoadSettings, LoraSettings, ModelSettings, PromptCacheFile, RankSettings


def engine_config(options: Options) -> EngineConfig:
    """The engine's config. Settings for which the command has no options get their defaults.

    Without an option for it, the prompt cache is off: few commands need it, and `bench` must not use it.
    """
    speculation, given = speculation_config(options), options[RankSettings].layer_split
    n_drafters = _n_drafters(options, speculation)
    serving = {"cache_prompt": False, "n_requests": 1, **options.fields(EngineConfig)}
    n_requests = serving["n_requests"]
    n_seq = _sequences(speculation.sequences, n_requests)
    drafts = draft_configs(options, n_seq, speculation.branches, uses_mtp(speculation))
    n_paths = (
        speculation.sequences + n_drafters - 1 if n_drafters else 1
    )  # each further drafter may propose a different token
    n_branches = speculation.branches if n_drafters else 0
    n_seq, n_states = _sequences(n_paths, n_requests), MAX_STATES if n_drafters else 0
    context = replace(options[ContextConfig], n_seq=n_seq, n_branches=n_branches, n_states=n_states)
    pipeline = replace(options[PipelineConfig], auto=given == "auto")
    if given is not None and given != "auto":
        pipeline = replace(pipeline, layer_split=given[0])
    prompt_cache = options[PromptCacheFile].config
    return EngineConfig(model_config(options), context, pipeline, drafts, prompt_cache=prompt_cache, **serving)


def _sequences(n_each: int, n_requests: int) -> int:
    """Number of sequence ids of a context. Raises SettingError."""
    check_range("n_requests", n_requests, 1, MAX_SEQUENCES)
    return max(min(n_each * n_requests, MAX_SEQUENCES), n_requests)


def _n_drafters(options: Options, speculation: SpeculationConfig) -> int:
    """Number of drafters per request. Raises UsageError if one is missing, or if a draft model has no use."""
    names, n_models = speculation.drafters, len(options[ModelSettings].drafts)
    has_mtp = uses_mtp(speculation)
    if given_mode(options) in ("async", "speculative"):
        if names == ():
            raise SettingError(
                "mode",
                Wording(f"{speculation.mode} needs a drafter, but ", Setting("spec_type"), " is none"),
                "name one",
            )
        if names is None:
            check_draft(options, Wording(Setting("mode"), f" {speculation.mode}"))
    if names is not None:
        with_model = [name for name in names if name in registry.WITH_MODEL and name != registry.MTP]
        if with_model:
            what = registry.model_of(with_model[0] if len(with_model) == 1 else "draft")
            check_draft(options, Wording(Setting("spec_type"), f" {with_model[0]}"), what)
        elif n_models and names:
            raise SettingError(
                "draft.model",
                Wording("is not used with ", Setting("spec_type"), f" {','.join(names)}"),
                "omit it, or add draft to the list",
            )
    return registry.most_chosen(names, n_models + has_mtp)


def uses_mtp(speculation: SpeculationConfig) -> bool:
    """Whether the target's MTP layers are to draft."""
    return registry.MTP in (speculation.drafters or ())


def check_draft(options: Options, what: str | Wording, needed: str = "a draft model") -> None:
    """Raises UsageError if there is no draft model. `what`: what needs one. `needed`: what to call it."""
    if not options[ModelSettings].drafts:
        raise UsageError(what, f" needs {needed}: name one with ", Setting("draft.model"))


def model_config(options: Options) -> ModelConfig:
    """The target model."""
    path, loras = options[ModelSettings].target, options[LoraSettings]
    if path is None:
        raise UsageError("name a model with ", Setting("model"))
    adapters = (*((lora, 1.0) for lora in loras.plain), *loras.scaled)
    fields = options.fields(ModelConfig)
    return ModelConfig(path=path, load_mode=options[LoadSettings].mode, loras=adapters, **fields)


def draft_configs(
    options: Options, n_seq: int = 1, n_branches: int = 0, has_mtp: bool = False
) -> tuple[DraftConfig, ...]:
    """The draft models, those with ranks of their own first. `has_mtp`: the target's MTP layers are one, after those
    that have files.

    They are loaded like the target, with contexts of the same size. RoPE settings, kernels and metadata are their own,
    but MTP layers have the target's.
    """
    paths, target, given = options[ModelSettings].drafts, options[ContextConfig], options[RankSettings].layer_split
    splits = given[1:] if given is not None and given != "auto" else ()
    if len(splits) > max(len(paths) + has_mtp, 1):
        raise SettingError(
            "layer_split",
            Wording(f"has ranks for {len(splits)} draft models, but ", Setting("draft.model"), f" names {len(paths)}"),
            "name each draft model",
        )
    if splits and not has_mtp:
        check_draft(options, "a split with ranks after the /")
    fields = {name: value for name, value in options.fields(ModelConfig).items() if name in ("repack", "numa")}
    mode = options[LoadSettings].mode
    if mode == "stream":  # a draft model is small, and all of it is read for each token
        mode = "auto"
    context = ContextConfig(
        n_ctx=target.n_ctx, n_batch=target.n_batch, n_ubatch=target.n_ubatch, n_seq=n_seq, n_branches=n_branches,
        cache_type_k=target.cache_type_k, cache_type_v=target.cache_type_v, flash_attn=target.flash_attn,
        fast_kernels=target.fast_kernels,
    )  # fmt: skip
    own = options.fields(DraftConfig)
    drafts = [
        DraftConfig(model=ModelConfig(path=path, load_mode=mode, **fields), context=context, **own) for path in paths
    ]
    if has_mtp:
        model, context = (
            replace(model_config(options), load_mode=mode, loras=()),
            replace(target, n_seq=n_seq, n_branches=n_branches),
        )
        drafts.append(DraftConfig(model=model, is_mtp=True, context=replace(context, exact=False), **own))
    drafts = [replace(draft, layer_split=split) for draft, split in itertools.zip_longest(drafts, splits)]
    return tuple(sorted(drafts, key=lambda draft: draft.layer_split is None))


def draft_threads(options: Options) -> int:
    """Number of threads for a draft model, even if there is none; -1 if not given."""
    return DraftConfig(model=ModelConfig(path=Path()), **options.fields(DraftConfig)).threads


def draft_window(options: Options) -> int:
    """Number of tokens that draft models see, even if there are none."""
    return DraftConfig(model=ModelConfig(path=Path()), **options.fields(DraftConfig)).window


def given_mode(options: Options) -> Mode | None:
    """The mode that the user chose, or None."""
    mode: Mode | None = options.fields(SpeculationConfig).get("mode")
    return mode


def speculation_config(options: Options) -> SpeculationConfig:
    """How to draft."""
    fields = options.fields(SpeculationConfig)
    if "n_min" in fields and "n_draft" in fields:
        fields["n_min"] = min(fields["n_min"], fields["n_draft"])
    if any(map(options.is_given, THRESHOLDS)):
        fields["policy"] = "thresholds"
    speculation = SpeculationConfig(**fields)
    return speculation.as_chain if _drafts_chains(options) else speculation


def warnings_of(options: Options) -> list[Wording]:
    """Warnings about settings that are changed."""
    if _drafts_chains(options) and options[ModelSettings].drafts and options[SpeculationConfig].n_parallel > 1:
        return [
            Wording(
                Setting("exact"), " without flash attention drafts only chains: using ", Setting("n_parallel"), " 1"
            )
        ]
    return []


def _drafts_chains(options: Options) -> bool:
    """Whether branches are impossible: without flash attention, their KV cells change the bits of other rows."""
    context = options[ContextConfig]
    return context.exact and context.flash_attn == "off"

"""What `simulate` and `plan` simulate: shapes of models, prompts and outputs, and traffic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ggpipe.cluster import recording
from ggpipe.cluster.model_shape import ModelShape, block_head_shape, head_shape, mtp_shape
from ggpipe.cluster.recording import Recording
from ggpipe.config.context import MAX_PREFIXES, ContextConfig
from ggpipe.core.drafters import registry
from ggpipe.errors import ModelError, Setting, SettingError, UsageError, Wording
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    ModelSettings,
    SimulatedDrafters,
    SimulatedText,
    SimulatedTraffic,
)
from ggpipe.sim.arrivals import Traffic, read_arrivals
from ggpipe.sim.simulation_spec import SyntheticText
from ggpipe.sim.text import SECOND_CHOICE

_AGREEMENT = 0.7
_USUAL_HEADS = {"eagle3": head_shape, "dflash": block_head_shape, registry.MTP: mtp_shape}


def shapes_of(options: Options) -> tuple[ModelShape | None, tuple[ModelShape, ...]]:
    """The shapes of the target and the draft models, from the headers of their files; None without a file."""
    models, context = options[ModelSettings], options[ContextConfig]
    drafts = [_shape(path, models.target, context) for path in models.drafts]
    return _shape(models.target, None, context), tuple(shape for shape in drafts if shape is not None)


def drafts_of(
    given: SimulatedDrafters, files: Sequence[ModelShape], own: ModelShape | None, target: ModelShape
) -> tuple[ModelShape, ...]:
    """The shapes of all draft models, in the order of their drafters. `files`: those that were named. `own`: the
    cluster's. Raises UsageError where there is none for a drafter."""
    files = files or ((own,) if own is not None else ())
    if given.drafters is None:
        return tuple(files)
    drafts = [shape for shape in files if not shape.taps]
    found = []
    for drafter in given.drafters:
        if drafter.kind in _USUAL_HEADS:
            named = [shape for shape in files if shape.drafter == drafter.kind]
            found.append(named[0] if named else _USUAL_HEADS[drafter.kind](target))
        elif drafter.kind == "draft":
            if not drafts:
                raise SettingError(
                    "drafters", "draft needs a draft model", Wording("name one with ", Setting("draft.model"))
                )
            found.append(drafts.pop(0) if len(drafts) > 1 else drafts[0])
    return tuple(found)


def _shape(path: Path | None, target: Path | None, context: ContextConfig) -> ModelShape | None:
    """`target`: that of a draft model, if there is one."""
    if path is None:
        return None
    from ggpipe.llama import libllama  # only model files need libllama
    from ggpipe.llama.draft_heads import open_draft
    from ggpipe.llama.gguf import ModelFile
    from ggpipe.llama.model_shape import shape_of

    libllama.set_log_level(5)
    types = (context.cache_type_k, context.cache_type_v, context.flash_attn != "off")
    file = ModelFile.open(path) if target is None else open_draft(path, target)
    return shape_of(file, *types, context.n_seq, MAX_PREFIXES)


def mtp_of(options: Options, target: ModelShape) -> ModelShape | None:
    """The shape of the MTP layers in the target's file; None without a file, or without layers that can draft."""
    path, context = options[ModelSettings].target, options[ContextConfig]
    if path is None:
        return None
    from ggpipe.llama import mtp  # only model files need libllama
    from ggpipe.llama.gguf import ModelFile

    file = ModelFile.open(path)
    try:
        mtp.check(file)
    except ModelError:
        return None
    return mtp.shape_of_mtp(file, target, context.cache_type_k, context.cache_type_v)


def text_of(text: SimulatedText, drafters: SimulatedDrafters, n_drafts: int = 1) -> SyntheticText | Recording:
    """The tokens to simulate. `n_drafts`: draft models. Raises UsageError for settings that contradict each other, and
    for a bad recording."""
    named = drafters.drafters or ()
    shares = [drafter.share for drafter in named if drafter.kind != "ngram"]
    repeats = next((drafter.share for drafter in named if drafter.kind == "ngram"), None)
    if text.recording is None:
        usual = _AGREEMENT if text.acceptance is None else text.acceptance
        first, *others = shares or [None] * max(n_drafts, 1)
        return SyntheticText(
            agreement=usual if first is None else first,
            others=tuple(usual if own is None and first is not None else own for own in others),
            overlap=drafters.overlap,
            repeats=repeats or 0.0,
            second_choice=SECOND_CHOICE if text.second_choice is None else text.second_choice,
            n_prompt=text.prompt_tokens,
            confidence=text.confidence,
            seed=text.seed,
        )
    if n_drafts > 1:
        raise SettingError("recording", "has the candidates of one draft model", "simulate one")
    if any(share is not None for share in (*shares, repeats)):
        raise SettingError("drafters", "has shares, and those of a recording are fixed", "omit them")
    for name, share in (("acceptance", text.acceptance), ("second_choice", text.second_choice)):
        if share is not None:
            words = name.replace("_", " ")
            raise UsageError(f"the {words} of a recording is fixed: omit ", Setting("recording"), " or ", Setting(name))
    return recording.read(text.recording)


def traffic_of(given: SimulatedTraffic, seed: int) -> Traffic | None:
    """The requests that share the pipeline; None for a single one. Raises UsageError."""
    if not given.is_given:
        return None
    return Traffic(
        users=given.users,
        rate=given.rate,
        n_total=given.requests,
        listed=read_arrivals(given.arrivals) if given.arrivals is not None else (),
        n_requests=given.concurrent,
        seed=seed,
    )

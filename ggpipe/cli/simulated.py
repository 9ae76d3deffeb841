"""What `simulate` and `plan` simulate: shapes of models, prompts and outputs, and traffic."""

from __future__ import annotations

from pathlib import Path

from ggpipe.cluster import recording
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.config.context import MAX_PREFIXES, ContextConfig
from ggpipe.errors import Setting, UsageError
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    ModelSettings,
    SimulatedText,
    SimulatedTraffic,
)
from ggpipe.sim.arrivals import Traffic, read_arrivals
from ggpipe.sim.simulation_spec import SyntheticText

_AGREEMENT = 0.7


def shapes_of(options: Options) -> tuple[ModelShape | None, ModelShape | None]:
    """The shapes of the target and the draft model, from the headers of their files; None without a file."""
    models, context = options[ModelSettings], options[ContextConfig]
    return _shape(models.target, context), _shape(models.the_draft, context)


def _shape(path: Path | None, context: ContextConfig) -> ModelShape | None:
    if path is None:
        return None
    from ggpipe.llama import libllama  # only model files need libllama
    from ggpipe.llama.gguf import ModelFile
    from ggpipe.llama.model_shape import shape_of

    libllama.set_log_level(5)
    types = (context.cache_type_k, context.cache_type_v, context.flash_attn != "off")
    return shape_of(ModelFile.open(path), *types, context.n_seq, MAX_PREFIXES)


def text_of(text: SimulatedText) -> SyntheticText | Recording:
    """The tokens to simulate. Raises UsageError for settings that contradict each other, and for a bad recording."""
    if text.recording is None:
        agreement = _AGREEMENT if text.acceptance is None else text.acceptance
        return SyntheticText(
            agreement=agreement, n_prompt=text.prompt_tokens, confidence=text.confidence, seed=text.seed
        )
    if text.acceptance is not None:
        raise UsageError(
            "the acceptance of a recording is fixed: omit ", Setting("recording"), " or ", Setting("acceptance")
        )
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

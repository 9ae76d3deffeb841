"""`ggpipe pairs`: which draft models fit a target."""

from __future__ import annotations

import enum
from pathlib import Path

from ggpipe.config.model import ModelConfig
from ggpipe.display.format import harmless, human_bytes
from ggpipe.errors import RunError, Setting, UsageError
from ggpipe.llama.completed import misfit
from ggpipe.llama.draft_heads import needs_of
from ggpipe.llama.eagle3 import head_misfit
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.vocab import Vocab
from ggpipe.options.option import Options
from ggpipe.options.settings import ModelSettings


def run(options: Options) -> int:
    """Print a line per draft model. Returns the exit code: 0 if any of them fits."""
    models = options[ModelSettings]
    assert models.target is not None  # a required option
    if not models.drafts:
        raise UsageError("name draft models with ", Setting("draft.model"), " or ", Setting("draft.hf_repo"))
    target = ModelFile.open(models.target)
    vocab = Vocab(target, ModelConfig(path=models.target))
    print(f"target {_described(target)}, {vocab.n_tokens:,} tokens in its vocabulary")
    n_fit = 0
    for path in models.drafts:
        draft = ModelFile.open(path)
        fit, why = _fit(target, vocab, draft, path)
        share = f"{draft.n_bytes / target.n_bytes:.1%} of the target's weights"
        print(f"{fit}: {_described(draft)}, {share}" + (f": {why}" if why else ""))
        n_fit += fit is not _Fit.NOT
    return 0 if n_fit else RunError.exit_code


class _Fit(enum.StrEnum):
    AS_IT_IS = "fits"
    TRANSLATED = "fits by its text"
    NOT = "does not fit"


def _described(model: ModelFile) -> str:
    name = harmless(model.paths[0].name)
    return f"{name} ({model.architecture}, {model.n_layer} layers, {human_bytes(model.n_bytes)})"


def _fit(target: ModelFile, vocab: Vocab, draft: ModelFile, path: Path) -> tuple[_Fit, str]:
    """Whether a draft model fits, and why not, or why its tokens have to be translated."""
    needs = needs_of(draft)
    if needs is not None:
        why = head_misfit(needs, target) or misfit(draft, target)
        return (_Fit.NOT, why) if why else (_Fit.AS_IT_IS, "")
    own = Vocab(draft, ModelConfig(path=path))
    try:
        found = vocab.compared_with(own.outline())
    finally:
        own.close()
    return (_Fit.TRANSLATED, found) if isinstance(found, str) else (_Fit.AS_IT_IS, "")

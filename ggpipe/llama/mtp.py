"""MTP layers: layers for multi-token prediction, which some models have after the others, as a stage of their own.

    position P reads     the token at P, and a state: of the target at P - 1, or the layers' own of the row before
    it gives             logits of the token at P + 1, and a state for drafting on

The stage loads these layers from the target's file, with the input embedding and the output layer, into a context of
libllama's own kind. The target's last stage sends the states. The order of llama.cpp's `draft-mtp` is the same.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ggpipe.cluster.model_shape import ModelShape, mtp_shape
from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.core.drafters.eagle import HORIZON
from ggpipe.core.messages import Row
from ggpipe.errors import ModelError, Setting, Wording
from ggpipe.llama.eagle3 import HeadStage, States
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import LastStates, input_of_mtp
from ggpipe.llama.model_header import ModelHeader, n_bytes
from ggpipe.llama.stage import BoundaryTensors

_WITH_SEVERAL = frozenset(["hy_v3", "step35"])
ARCHITECTURES = _WITH_SEVERAL | frozenset(
    """
    bailingmoe3 cohere2moe deepseek2 deepseek32 deepseek4 glm-dsa glm4moe nemotron_h_moe qwen35 qwen35moe qwen3next
    """.split()  # noqa: SIM905
)
"""Those whose MTP layers libllama can draft with. Only some may have several of them: for others it ends the process.
`tests/support/mtp_check.py` checks one."""


def needs_of(model_file: ModelFile) -> HeadNeeds:
    """What the MTP layers of this model read of it."""
    return HeadNeeds(
        layers=(input_of_mtp(model_file.n_layer),),
        width=ModelHeader(model_file).width * _n_states(model_file),
        horizon=HORIZON,
    )


def _n_states(model_file: ModelFile) -> int:
    """Hidden states of a token, as DeepSeek-V4 has several."""
    n = model_file.metadata.get(f"{model_file.architecture}.hyper_connection.count")
    return n if isinstance(n, int) else 1


def check(model_file: ModelFile) -> None:
    """Raises ModelError for a model without MTP layers, or with some that libllama cannot draft with."""
    n, architecture = model_file.n_mtp, model_file.architecture
    advice = "use another drafter"
    if n == 0:
        problem = "it has no MTP layers"
    elif f"blk.{model_file.n_layer}.nextn.eh_proj.weight" not in model_file.tensors:
        problem, advice = "its file lacks the weights of its MTP layers", "convert it again with them"
    elif architecture not in ARCHITECTURES:
        problem = f"libllama does not draft with the MTP layers of '{architecture}' models"
    elif n > 1 and architecture not in _WITH_SEVERAL:
        problem = f"it has {n} MTP layers, and of '{architecture}' models libllama supports one"
    elif architecture == "glm4moe" and _reads_images(model_file):
        problem = "libllama does not draft with the MTP layers of models that read images"
    else:
        return
    raise ModelError(Wording(Setting("spec_type"), " mtp does not fit ", Setting("model")), f": {problem}; {advice}")


def _reads_images(model_file: ModelFile) -> bool:
    """Whether positions have several dimensions, for which libllama has no graph of the MTP layers of `glm4moe`."""
    sections = model_file.metadata.get(f"{model_file.architecture}.rope.dimension_sections")
    return isinstance(sections, tuple) and all(section > 0 for section in sections[:2])


def shape_of_mtp(model_file: ModelFile, target: ModelShape, cache_type_k: str, cache_type_v: str) -> ModelShape:
    """The shape of a model's MTP layers. `target`: that of the model. The types are those of their KV cache."""
    header = ModelHeader(model_file, with_mtp=True)
    layers = range(model_file.n_layer, model_file.n_blocks)
    return mtp_shape(
        target,
        tuple(n_bytes(header.layers[layer]) for layer in layers),
        tuple(header.cell_bytes(layer, cache_type_k, cache_type_v) for layer in layers),
        tuple(header.expert_bytes(layer) for layer in layers),
    )


class MtpStage(HeadStage):
    """A model's MTP layers. It is a stage whose rows read states beside their tokens."""

    _needs_of = staticmethod(needs_of)
    _context_type = 1  # LLAMA_CONTEXT_TYPE_MTP

    @staticmethod
    def _layers_of(model_file: ModelFile) -> tuple[int, int]:
        return model_file.n_layer, model_file.n_blocks

    @property
    def rolls_back(self) -> bool:
        """As `Stage.rolls_back`: MTP layers have attention only."""
        return True

    @property
    def _state_width(self) -> int:
        return self._width

    def _dry_run(self) -> BoundaryTensors:
        self._last_states = LastStates(self._context, of_all_rows=False)  # some graphs have no others
        self._compute((Row(token=0, pos=0, seqs=(0,), request=0, logits_request=0),), self._no_states(1), 0)
        self.forget_all()
        return BoundaryTensors(collections.Counter(), collections.Counter())

    def _encode(self, states: States) -> States:
        return states

    def _compute(self, rows: Sequence[Row], states: States, run_id: int) -> tuple[int, float]:
        self._has_states = any(row.logits_request >= 0 for row in rows)
        return super()._compute(rows, states, run_id)

    def _computed_states(self, n_rows: int) -> States:
        return super()._computed_states(n_rows) if self._has_states else self._no_states(0)

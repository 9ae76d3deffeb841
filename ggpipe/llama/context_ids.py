"""How the sequence ids of a stage's context are divided: the same way in all stages of a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.config.context import ContextConfig
from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.sequence_memory import COMPRESSED, CompressedMemory

_CELLS_OF_BRANCH = 8
"""Cells of a context for each sequence id of a branch: in a short one, branches without cells are useless."""
TAKES_BACK = frozenset(
    """
    arwkv7 bailingmoe3 deepseek4 falcon-h1 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe mamba mamba2
    nemotron_h nemotron_h_moe plamo2 qwen35 qwen35moe qwen3next qwen4exp rwkv6 rwkv7
    """.split()  # noqa: SIM905
)
"""Architectures with recurrent or compressed states that compute the same bits after one was taken back, and with
`exact` also whatever the number of rows. `tests/support/state_check.py` checks one."""


@dataclass(frozen=True, kw_only=True)
class ContextIds:
    """Sequence ids of a context: those of `ContextConfig.n_seq` first, then the others in this order."""

    n_prefixes: int
    """Number of ids for kept prefixes."""
    n_branches: int
    """For branches of draft tokens; where states cannot go back, for the states that draft tokens are taken back to."""
    pins: int
    """From an id to its pin; 0: there are no pins."""
    spare: int
    """The id that states are saved from, and restored to."""
    n_seq: int
    """All of them."""

    @property
    def n_own(self) -> int:
        """Number of ids, without pins and the spare one."""
        return self.pins or self.spare


def divide_ids(
    model_file: ModelFile, config: ContextConfig, n_ctx: int, n_prefixes: int, *, slides: bool, rolls_back: bool,
    saves_states: bool,
) -> ContextIds:  # fmt: skip
    """`n_ctx`: cells that the context is asked for. `n_prefixes`: at most. `slides`: the model has sliding windows;
    `rolls_back`, `saves_states`: see `Stage`. Raises SettingError where not even `ContextConfig.n_seq` ids fit."""
    n_spare = int(saves_states and rolls_back)
    most = (int(lib.llama_max_parallel_sequences()) - n_spare) // (1 + slides)
    fitting = (n_ctx - n_spare) // (1 + slides)
    n_branches, n_rows = config.n_branches, min(config.n_batch, config.n_ubatch)
    room = min(most, fitting // _CELLS_OF_BRANCH, n_rows // (1 + slides))
    if not rolls_back:
        n_prefixes = min(n_prefixes, _most_states(model_file, n_ctx))
        n_branches, room = min(config.n_states, most_taken_back(model_file)), min(most, fitting)
    n_prefixes = max(min(n_prefixes, most - config.n_seq, fitting - config.n_seq), 0)
    n_own = config.n_seq + n_prefixes
    n_branches = max(min(n_branches, room - n_own), 0)
    n_own += n_branches
    pins = n_own if slides and n_own > 1 else 0
    n_seq = n_own + pins + n_spare
    if n_seq > lib.llama_max_parallel_sequences():
        raise SettingError("n_seq", f"must be at most {most} for a model with sliding windows, got {config.n_seq}")
    if n_ctx < n_seq:
        raise SettingError(
            "n_seq",
            f"{config.n_seq} needs a context of {n_seq} tokens; the model's own has {n_ctx}",
            Wording("set ", Setting("n_ctx")),
        )
    return ContextIds(n_prefixes=n_prefixes, n_branches=n_branches, pins=pins, spare=n_own + pins, n_seq=n_seq)


def _most_states(model_file: ModelFile, n_ctx: int) -> int:
    """Sequences beside those of requests, where each has a state or cells of its own. The same for all stages."""
    header = ModelHeader(model_file)
    return header.most_sequences(n_ctx) if model_file.architecture in COMPRESSED else header.most_states


def most_taken_back(model_file: ModelFile) -> int:
    """States that draft tokens can be taken back to."""
    if model_file.architecture in COMPRESSED and not CompressedMemory.is_known():
        return 0
    return ModelHeader(model_file).most_states if model_file.architecture in TAKES_BACK else 0

"""Draft heads and MTP layers of targets whose stages are groups: part 0 sends the states that they read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import dflash
from support.architectures import write
from support.commands import TARGET
from support.draft_heads import chains_sent, modes_of
from support.eagle3 import PlainHead
from support.mtp import PlainMtp, agreeing
from support.near_ties import differ_at_near_ties_only
from support.pipeline import local_session
from support.reference import Reference
from support.requests import asked
from support.tale import prompt

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import parse_layer_split
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.engine.session import Session
from ggpipe.errors import ModelError
from ggpipe.llama.bundled import BUNDLED_HEAD
from ggpipe.stats.records import RequestStats

pytestmark = pytest.mark.usefixtures("eager_drafts")

N_TOKENS = 40
GREEDY = SamplingConfig(temp=0, ignore_eos=True)
NUMBERS = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(40))
SPLITS = ("1.0*2/1.0", "0.5*2,0.5*2/1.0", "0.4,0.6*2")

DraftsOf = Callable[[Sequence[int], Sequence[int], Sequence[int], int], dict[int, list[int]]]


def config_of(split: str, target: Path, head: Path | None) -> EngineConfig:
    """`head`: None stands for the target's MTP layers."""
    shares, own = (*parse_layer_split(split), None)[:2]
    context = ContextConfig(n_ctx=256, n_ubatch=32, n_seq=3, n_branches=16, n_states=8)
    draft = DraftConfig(model=ModelConfig(path=head or target), is_mtp=head is None, context=context, layer_split=own)
    return EngineConfig(ModelConfig(path=target), context, PipelineConfig(shares, threads=(1,)), (draft,))


def generate(session: Session, tokens: Sequence[int], kind: str, mode: str) -> tuple[list[int], RequestStats]:
    request = session.submit(asked(tuple(tokens), GREEDY, N_TOKENS, modes_of(kind)[mode]))
    while request.is_active:
        session.step()
    return list(request.token_ids), request.stats


def check(
    split: str,
    target: Path,
    head: Path | None,
    kind: str,
    drafts_of: DraftsOf,
    text: Sequence[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The text stays libllama's, and draft tokens are `drafts_of`'s, but for near-ties: sums have another order."""
    with Reference(target, 256) as reference:
        expected = reference.generate(tuple(text), GREEDY, N_TOKENS)
    config = config_of(split, target, head)
    assert config.pipeline.n_ranks is not None
    with local_session(config, config.pipeline.n_ranks + config.n_draft_ranks) as session:
        sent = chains_sent(monkeypatch)
        tokens, stats = generate(session, text, kind, "speculative")
        differ_at_near_ties_only(tokens, expected, target, text)
        sent.pop(0, None)
        drafted = drafts_of(text, tokens, sorted(sent), 3)
        same = sum(own == drafted[epoch][: len(own)] for epoch, own in sent.items())
        assert len(sent) >= N_TOKENS / 4
        assert same >= 0.8 * len(sent)
        n_right = stats.counters.by_drafter.get(0, (0, 0))[1]
        for mode in ("async", "chains"):
            tokens, stats = generate(session, text, kind, mode)
            differ_at_near_ties_only(tokens, expected, target, text)
    assert n_right > 0 or kind == "dflash"


@pytest.mark.parametrize("split", SPLITS)
def test_eagle3(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_of = PlainHead(TARGET, BUNDLED_HEAD).drafts
    check(split, TARGET, BUNDLED_HEAD, "eagle3", drafts_of, prompt(), monkeypatch)


@pytest.mark.parametrize("split", SPLITS[:2])
def test_dflash(split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = dflash.write(tmp_path / "head.gguf", TARGET)
    check(split, TARGET, head, "dflash", dflash.PlainDFlash(TARGET, head).drafts, prompt(), monkeypatch)


@pytest.mark.each_value
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", ["glm4moe", "deepseek2", "qwen35"])
def test_mtp(name: str, split: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = agreeing(name, tmp_path / "target.gguf", n_layer=4)
    check(split, target, None, "mtp", PlainMtp(target).drafts, NUMBERS, monkeypatch)


def test_a_head_that_is_a_group_itself(tmp_path: Path) -> None:
    target = write("glm4moe", tmp_path / "target.gguf", n_mtp=1)
    for model, head, message in (
        (TARGET, BUNDLED_HEAD, "heads run on one rank, and it has 2: give it one share"),
        (target, None, "MTP layers run on one rank, and they have 2: give them one share"),
    ):
        with pytest.raises(ModelError, match=message), local_session(config_of("1.0/1.0*2", model, head), 3):
            pass

"""A target with tokens that its draft does not have: chat fine-tunes add them to a base model's."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from support import in_process
from support.chat_model import add_tokens
from support.commands import TARGET
from support.pipeline import local_session
from support.requests import asked

from ggpipe.cluster.recording import read
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.vocab import Vocab
from ggpipe.stats.records import RequestStats

DRAFT = TARGET.with_name("tales-draft.gguf")
N_OWN = 2048
ADDED = ("<|turn|>", "<|sep|>", "<|end|>")
PROMPT = "<|turn|>Once upon a time<|end|>\n<|turn|>there was a king"
SAMPLING = SamplingConfig(temp=0.8, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    comma = vocab.tokenize("king, and")[2]
    assert vocab.piece(comma) == b","
    vocab.close()
    return add_tokens(TARGET, tmp_path_factory.mktemp("chat") / "chat.gguf", ADDED, like=comma)


@pytest.mark.parametrize("n_draft_ranks", [0, 1])
def test_the_draft_reads_a_stand_in(chat: Path, n_draft_ranks: int) -> None:
    """The prompt has such tokens, and the target draws them: the text is its own, and draft tokens are accepted."""
    context = ContextConfig(n_ctx=256, exact=True)
    draft = DraftConfig(
        model=ModelConfig(path=DRAFT),
        context=ContextConfig(n_ctx=256),
        layer_split=LayerSplit((1.0,) * n_draft_ranks) if n_draft_ranks else None,
    )
    config = EngineConfig(
        model=ModelConfig(path=chat), context=context, pipeline=PipelineConfig(threads=(1,)), drafts=(draft,)
    )
    with local_session(config, 1 + n_draft_ranks) as session:
        prompt = session.vocab.tokenize(PROMPT)
        assert max(prompt) >= N_OWN
        texts = {}
        for mode in get_args(Mode):
            stats = RequestStats()
            tokens = session.stream(asked(prompt, SAMPLING, 120, SpeculationConfig(mode=mode)), stats)
            texts[mode] = [token.id for token in tokens]
            if mode == "speculative":  # in async mode that depends on how fast the draft is
                assert stats.counters.accepted_tokens > 10
        assert any(token >= N_OWN for token in texts["iterative"]), "no such token was drawn"
        assert texts["speculative"] == texts["async"] == texts["iterative"]


def test_record(chat: Path, tmp_path: Path) -> None:
    path = tmp_path / "recording.json"
    result = in_process.ggpipe(
        "record", "-m", chat, "-md", DRAFT, "-p", PROMPT, "-n", 60, "-s", 2, "--ignore-eos", "-o", path
    )
    assert result.returncode == 0, result.stderr
    (take,) = read(path).prompts
    assert any(token >= N_OWN for token in take.text)
    assert all(token < N_OWN for candidates in take.candidates for token, _ in candidates)
    assert sum(take.agrees) > 10

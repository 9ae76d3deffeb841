"""Several requests on a pipeline whose runs of prompts pause for others: outputs keep their bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
from support.architectures import write
from support.commands import ROOT, TARGET
from support.near_ties import differ_at_near_ties_only
from support.oracle import Oracle, drafting
from support.pipeline import local_session
from support.reference import Reference
from support.requests import asked
from support.zoo import make

from ggpipe.channel.events import TokenReady
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit, parse_layer_split
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.messages import Run
from ggpipe.core.request import Finish
from ggpipe.engine.session import Session
from ggpipe.errors import GgpipeError
from ggpipe.llama.bundled import BUNDLED_HEAD
from ggpipe.llama.inflate import Inflation, Mixture
from ggpipe.llama.pauses import Pauses
from ggpipe.llama.stage import Outcome, Stage

N_CTX, N_PREDICT = 2048, 24
EXPERTS = Mixture(n_expert=8, n_used=2)
SAMPLING, GREEDY = SamplingConfig(temp=0.8, seed=1), SamplingConfig(temp=0, ignore_eos=True)
ITERATIVE = SpeculationConfig(mode="iterative")
ASYNC = SpeculationConfig(drafters=("ngram",))
Tokens = tuple[int, ...]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "llama.gguf", n_layer=6)


@pytest.fixture(scope="module")
def tale() -> Tokens:
    with Reference(TARGET, N_CTX) as reference:
        return reference.tokenize((ROOT / "prompts" / "tale.txt").read_text()) * 9


def words(first: int, n: int) -> Tokens:
    return tuple(3 + (first + 37 * i + i * i) % 110 for i in range(n))


@contextmanager
def loaded(path: Path, n_ranks: int, split: str = "", head: Path | None = None) -> Iterator[tuple[Session, list[int]]]:
    """A session, and a list that grows with each pause. `split`: with groups, whose rows are not exact. `head`: a draft
    head, which has a rank of its own."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=128, n_seq=12)
    drafts = (
        [DraftConfig(model=ModelConfig(path=head), context=context, layer_split=LayerSplit((1.0,)))] if head else []
    )
    config = EngineConfig(
        model=ModelConfig(path=path),
        context=replace(context, exact=not split),
        pipeline=PipelineConfig(parse_layer_split(split)[0] if split else None, threads=(1,)),
        drafts=tuple(drafts),
        n_requests=3,
    )
    pauses: list[int] = []
    pause = Pauses.pause

    def counted(self: Pauses) -> object:
        pauses.append(1)
        return pause(self)

    with patch.object(Pauses, "pause", counted), local_session(config, n_ranks) as session:
        yield session, pauses


@pytest.mark.parametrize("speculation", [ITERATIVE, ASYNC], ids=lambda speculation: speculation.mode)
@pytest.mark.parametrize("n_ranks", [2, 3])
def test_outputs_keep_their_bits(n_ranks: int, speculation: SpeculationConfig, path: Path) -> None:
    check_bits(path, n_ranks, speculation, (9, 700, 500, 8, 400))


@pytest.mark.parametrize(("name", "n_ranks"), [("qwen35moe", 3), ("falcon-h1", 2)])
def test_outputs_of_hybrid_models_keep_their_bits(name: str, n_ranks: int, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", n_layer=6)
    check_bits(path, n_ranks, ASYNC, (9, 200, 170, 8, 190))


def check_bits(path: Path, n_ranks: int, speculation: SpeculationConfig, lengths: Sequence[int]) -> None:
    """Of outputs for prompts of these lengths, against libllama alone, one row at a time: it has other bits in longer
    runs."""
    prompts = [words(i, n) for i, n in enumerate(lengths, 1)]
    with Reference(path, N_CTX, exact=True) as reference:
        outputs = [tuple(reference.generate(prompt, SAMPLING, N_PREDICT, n_rows=1)) for prompt in prompts]
    oracle = Oracle(dict(zip(prompts, outputs, strict=True)), 5)
    with drafting(oracle), loaded(path, n_ranks) as (engine, pauses):
        requests = [engine.submit(asked(prompt, SAMPLING, N_PREDICT, speculation)) for prompt in prompts]
        texts: dict[int, list[int]] = {request.id: [] for request in requests}
        while any(request.is_active for request in requests):
            for event in engine.step():
                if isinstance(event, TokenReady):
                    texts[event.request].append(event.token.id)
    assert [tuple(text) for text in texts.values()] == outputs
    assert pauses


@pytest.mark.usefixtures("eager_drafts")
def test_a_draft_head_reads_states_of_runs_in_any_order(tale: Tokens) -> None:
    prompts = [tale[i : i + n] for i, n in ((1, 9), (2, 450), (3, 8), (4, 400))]
    with Reference(TARGET, N_CTX, exact=True) as reference:
        outputs = [tuple(reference.generate(prompt, GREEDY, 60, n_rows=1)) for prompt in prompts]
    with loaded(TARGET, 3, head=BUNDLED_HEAD) as (engine, pauses):
        requests = [engine.submit(asked(prompt, GREEDY, 60, SpeculationConfig())) for prompt in prompts]
        while any(request.is_active for request in requests):
            engine.step()
        assert [request.token_ids for request in requests] == outputs
        assert sum(request.stats.counters.accepted_tokens for request in requests) > 0
    assert pauses


@pytest.mark.parametrize("speculation", [ITERATIVE, ASYNC], ids=lambda speculation: speculation.mode)
@pytest.mark.parametrize(("mixture", "split"), [(None, "0.5*2,0.5"), (None, "0,0.5*2,0.5*2"), (EXPERTS, "1.0*2")])
def test_groups_pause(
    mixture: Mixture | None, split: str, speculation: SpeculationConfig, tale: Tokens, tmp_path: Path
) -> None:
    Inflation(TARGET, 4, 1, mixture=mixture).write(model := tmp_path / "model.gguf")
    with Reference(model, N_CTX) as reference:
        prompts = [tale[i : i + n] for i, n in ((1, 9), (2, 450), (3, 300), (4, 8), (5, 400))]
        outputs = [tuple(reference.generate(prompt, GREEDY, N_PREDICT)) for prompt in prompts]
    n_ranks = PipelineConfig(parse_layer_split(split)[0]).n_ranks
    assert n_ranks is not None
    oracle = Oracle(dict(zip(prompts, outputs, strict=True)), 5)
    with drafting(oracle), loaded(model, n_ranks, split) as (engine, pauses):
        requests = [engine.submit(asked(prompt, GREEDY, N_PREDICT, speculation)) for prompt in prompts]
        while any(request.is_active for request in requests):
            engine.step()
        for request, prompt, output in zip(requests, prompts, outputs, strict=True):
            differ_at_near_ties_only(list(request.token_ids), list(output), model, prompt)
    assert pauses


def test_a_prompt_is_stopped_beside_a_text(path: Path) -> None:
    text_prompt, prompt = words(1, 9), words(2, 900)
    with Reference(path, N_CTX, exact=True) as reference:
        outputs = [tuple(reference.generate(tokens, SAMPLING, 60, n_rows=1)) for tokens in (text_prompt, words(4, 300))]
    with loaded(path, 2) as (engine, pauses):
        first = engine.submit(asked(text_prompt, SAMPLING, 60, ITERATIVE))
        text: list[int] = []
        other = None
        n_steps = 0
        while first.is_active:
            text += [e.token.id for e in engine.step() if isinstance(e, TokenReady) and e.request == first.id]
            n_steps += 1
            if other is None or not other.is_active:
                other = engine.submit(asked(prompt, SAMPLING, 5, ITERATIVE))
            elif n_steps % 5 == 0:
                engine.cancel(other)
        assert other is not None
        engine.cancel(other)
        last = engine.submit(asked(words(4, 300), SAMPLING, 60, ITERATIVE))
        after: list[int] = []
        while last.is_active:
            after += [e.token.id for e in engine.step() if isinstance(e, TokenReady) and e.request == last.id]
        assert other.stats.finish is Finish.STOPPED
    assert [tuple(text), tuple(after)] == outputs
    assert pauses


def test_an_error_in_a_pause_ends_the_session(path: Path) -> None:
    decode = Stage.decode

    def failing(self: Stage, run: Run, *rest: object) -> Outcome:
        if pauses and not run.pauses:
            raise GgpipeError("broken")
        return decode(self, run, *rest)  # type: ignore[arg-type]

    with patch.object(Stage, "decode", failing), loaded(path, 2) as (engine, pauses):
        requests = [engine.submit(asked(words(i, n), SAMPLING, 400, ITERATIVE)) for i, n in ((1, 9), (2, 900))]

        def serve() -> None:
            while any(request.is_active for request in requests):
                engine.step()

        with pytest.raises(GgpipeError, match="broken"):
            serve()

"""Requests that go on from their tokens on other ranks: with --exact each text is the undisturbed one."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
from support.commands import TARGET
from support.pipeline import local_ranks
from support.requests import asked

from ggpipe.channel.client import ClientRequest
from ggpipe.channel.events import RequestEnded, TokenReady
from ggpipe.channel.messages import encode, from_head
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.engine.session import Session
from ggpipe.llama.vocab import TextDecoder
from ggpipe.stats.records import RequestStats

N_PREDICT = 40
CASES = (
    ("Once upon a time", SamplingConfig(temp=0, ignore_eos=True)),
    ("The wolf said to the", SamplingConfig(temp=0.8, seed=1, repeat_penalty=1.2, ignore_eos=True)),
    ("There was a king who had", SamplingConfig(temp=1.2, top_k=0, seed=2, frequency_penalty=0.2, ignore_eos=True)),
    ("A long time ago", SamplingConfig(temp=0, repeat_penalty=1.3, repeat_last_n=8, ignore_eos=True)),
)
TREES = SpeculationConfig(n_draft=6, n_parallel=4, p_split=0.05)


@contextmanager
def loaded(n_ranks: int, n_draft_ranks: int, n_ubatch: int) -> Iterator[Session]:
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=ContextConfig(n_ctx=512, n_ubatch=n_ubatch, n_seq=16, exact=True),
        pipeline=PipelineConfig(threads=(1,)),
        drafts=(
            DraftConfig(
                model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")),
                context=ContextConfig(n_ctx=512, n_seq=16),
                layer_split=LayerSplit((1.0,) * n_draft_ranks) if n_draft_ranks else None,
            ),
        ),
        n_requests=4,
    )
    with local_ranks(config, n_ranks + n_draft_ranks) as head:
        engine = Session.load(head)
        yield engine


def finish(engine: Session, requests: Sequence[ClientRequest]) -> list[list[tuple[int, str]]]:
    """The tokens of these requests, with their texts."""
    tokens: dict[int, list[tuple[int, str]]] = {request.id: [] for request in requests}
    while any(request.is_active for request in requests):
        for event in engine.step():
            if isinstance(event, TokenReady):
                tokens[event.request].append((event.token.id, event.token.text))
    return [tokens[request.id] for request in requests]


def resumed(engine: Session, texts: Sequence[Sequence[tuple[int, str]]], cuts: Sequence[int]) -> list[ClientRequest]:
    """All cases at a time, each from so many tokens of its text on."""
    return [
        engine.submit(
            asked(engine.vocab.tokenize(prompt), sampling, N_PREDICT, TREES, resumed=[token for token, _ in text[:cut]])
        )
        for (prompt, sampling), text, cut in zip(CASES, texts, cuts, strict=True)
    ]


def test_texts_go_on_on_other_ranks() -> None:
    rng = random.Random(5)
    with loaded(2, 1, 64) as engine:
        texts = finish(engine, resumed(engine, [[]] * 4, [0] * 4))
        assert [len(text) for text in texts] == [N_PREDICT] * 4
    for n_ranks, n_draft_ranks, n_ubatch in ((1, 0, 8), (3, 1, 32)):
        with loaded(n_ranks, n_draft_ranks, n_ubatch) as engine:
            for _ in range(4):  # from the second time on with texts that the prefix cache has
                cuts = [rng.choice((0, 1, rng.randrange(N_PREDICT), N_PREDICT - 1)) for _ in CASES]
                rests = finish(engine, resumed(engine, texts, cuts))
                assert rests == [text[cut:] for text, cut in zip(texts, cuts, strict=True)]


def test_the_end_of_a_resumed_text() -> None:
    sampling = SamplingConfig(temp=0, ignore_eos=True)
    with loaded(1, 0, 64) as engine:
        prompt = engine.vocab.tokenize("Once upon a time")

        def rest(n_predict: int, tokens: Sequence[int]) -> tuple[int, Finish | None]:
            request = engine.submit(asked(prompt, sampling, n_predict, resumed=tokens))
            (text,) = finish(engine, [request])
            return len(text), request.stats.finish

        text = [token for token, _ in finish(engine, [engine.submit(asked(prompt, sampling, 5))])[0]]
        assert rest(5, text) == (0, Finish.LENGTH)
        assert rest(7, text) == (2, Finish.LENGTH)
        n_most = engine.n_ctx - len(prompt)  # and the one behind them, which is sampled from the last cell
        assert rest(-1, (5,) * (n_most + 1)) == (0, Finish.CONTEXT_FULL)
        assert rest(-1, (5,) * n_most) == (1, Finish.CONTEXT_FULL)
        assert rest(-1, (5,) * (n_most - 1)) == (2, Finish.CONTEXT_FULL)


def test_log_probabilities_come_with_the_tokens() -> None:
    """With draft tokens as without, and through the channel."""
    sampling = SamplingConfig(seed=4, n_probs=3, ignore_eos=True)
    with loaded(2, 1, 64) as engine:
        texts = []
        for speculation in (None, TREES):
            request = engine.submit(asked(engine.vocab.tokenize("The wolf"), sampling, 12, speculation))
            tokens = []
            while request.is_active:
                tokens += [event.token for event in engine.step() if isinstance(event, TokenReady)]
            texts.append([(token.id, token.text, token.probs) for token in tokens])
            for token in tokens:
                own, *best = token.probs
                assert (own.id, own.text) == (token.id, engine.vocab.piece(token.id))
                assert len(best) == 3
                assert max(best, key=lambda prob: prob.logprob) == best[0]
                assert own in best or own.logprob <= best[-1].logprob < 0
                message = TokenReady(1, token, 0.0)
                assert from_head(encode(message)) == message
        assert texts[0] == texts[1]


def test_a_stop_string() -> None:
    """However the text is interrupted, it ends in front of the stop string."""
    prompt, greedy = "Once upon a time", SamplingConfig(temp=0, ignore_eos=True)
    with loaded(2, 1, 64) as engine:

        def answer(sampling: SamplingConfig, tokens: Sequence[int] = ()) -> tuple[list[tuple[int, str]], str, object]:
            speculation = TREES if len(tokens) % 2 else None
            request = engine.submit(asked(engine.vocab.tokenize(prompt), sampling, 30, speculation, resumed=tokens))
            text, rest = [], ""
            while request.is_active:
                for event in engine.step():
                    if isinstance(event, TokenReady):
                        text.append((event.token.id, event.token.text))
                    elif isinstance(event, RequestEnded):
                        rest = event.rest
            return text, rest, request.stats.finish

        whole = "".join(text for _, text in answer(greedy)[0])
        stop = whole[40:60]
        assert whole.index(stop) == 40
        stopping = replace(greedy, stop=("nowhere", stop))
        tokens, rest, why = answer(stopping)
        assert ("".join(text for _, text in tokens) + rest, why) == (whole[:40], Finish.STOP_STRING)
        for cut in range(1, len(tokens) + 1):
            assert answer(stopping, [token for token, _ in tokens[:cut]]) == (tokens[cut:], rest, why)
        begun = replace(greedy, stop=(whole + "!",))  # nothing is shown before the end
        tokens, rest, why = answer(begun)
        assert (["".join(text for _, text in tokens), rest, why]) == ["", whole, Finish.LENGTH]


def test_a_character_that_was_cut() -> None:
    with loaded(1, 0, 64) as engine:
        vocab = engine.vocab
        (half,) = (token for token in range(vocab.n_tokens) if vocab.piece(token) == "é".encode()[:1])
        stats = RequestStats(arrived=1.0, token_times=[2.0])
        request = engine.submit(asked((5, 6), SamplingConfig(temp=0, ignore_eos=True), 4, resumed=[half]), stats)
        (text,) = finish(engine, [request])
        decoder = TextDecoder(vocab)
        decoder.push(half)
        assert "".join(part for _, part in text) == "".join(decoder.push(token) for token, _ in text)
        assert "\ufffd" in text[0][1]
        assert (stats.n_prompt, stats.n_generated, stats.ttft_s) == (2, 4, 1.0)


@pytest.mark.parametrize("n_resumed", [0, 1])
def test_only_the_true_prompt_is_checked(n_resumed: int) -> None:
    with loaded(1, 0, 64) as engine, pytest.raises(Exception, match="the prompt is empty"):
        engine.begin(asked((), SamplingConfig(), resumed=[5] * n_resumed))

"""A session inside one process: head and workers as threads, real stages."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from support.commands import HANG_S, TARGET
from support.reference import Reference
from support.requests import asked

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import LoadMode, ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish
from ggpipe.engine.head import Head
from ggpipe.engine.session import Session
from ggpipe.engine.worker import Worker
from ggpipe.errors import RunError, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage
from ggpipe.stats.records import RequestStats
from ggpipe.transport.local import LocalWorld

DRAFT = TARGET.with_name("tales-draft.gguf")
GREEDY = SamplingConfig(temp=0, ignore_eos=True)


@contextmanager
def ranks(n_ranks: int, context: ContextConfig | None = None, drafts: bool = False) -> Iterator[Head]:
    """Nothing is loaded yet. `drafts`: with a draft model inside the head's process."""
    context = context or ContextConfig(n_ctx=512, n_ubatch=8)
    models = (DraftConfig(model=ModelConfig(path=DRAFT), context=context),) if drafts else ()
    config = EngineConfig(ModelConfig(path=TARGET), context, PipelineConfig(threads=(1,)), models)
    transports = LocalWorld(n_ranks).transports
    workers = [threading.Thread(target=Worker(t, config).serve, daemon=True) for t in transports[1:]]
    for worker in workers:
        worker.start()
    try:
        with Head(transports[0], config) as head:
            yield head
    finally:
        for worker in workers:
            worker.join(HANG_S)
            assert not worker.is_alive()


def text(session: Session, prompt: str, n: int, stats: RequestStats | None = None) -> str:
    return "".join(token.text for token in session.stream(asked(session.vocab.tokenize(prompt), GREEDY, n), stats))


@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_serves_several_requests(n_ranks: int) -> None:
    with ranks(n_ranks) as head:
        session = Session.load(head)
        stats = RequestStats()
        first = text(session, "Once upon a time there was a king who had three sons", 30, stats)
        assert text(session, "The wolf", 30) != first
        assert text(session, "Once upon a time there was a king who had three sons", 30) == first
        assert stats.n_generated == 30
        assert stats.finish is Finish.LENGTH
        assert len(stats.runs) > 30  # the prompt took several
        assert all(rank.runs == len(stats.runs) for rank in stats.ranks)


@pytest.mark.parametrize(
    ("n_ranks", "n_ubatch", "chunks"),
    [
        (1, 512, [300, 50]),
        (1, 128, [128, 128, 44, 50]),
        (2, 512, [*[16] * 18, 12, 16, 16, 16, 2]),
        (2, 20, [*[20] * 15, 20, 20, 10]),
        (3, 512, [*[16] * 18, 12, 16, 16, 16, 2]),
    ],
)
def test_a_context_shorter_than_a_batch(n_ranks: int, n_ubatch: int, chunks: list[int]) -> None:
    """libllama caps batches at -c and then rounds the context up: the prompt may be longer than a batch."""
    prompt = tuple(range(5, 355))
    with Reference(TARGET, 300, n_ubatch=min(n_ubatch, chunks[0])) as reference:
        expected = reference.generate(prompt, GREEDY, 20)
    with ranks(n_ranks, ContextConfig(n_ctx=300, n_ubatch=n_ubatch, fast_kernels=False)) as head:
        session = Session.load(head)
        stats = RequestStats()
        tokens = [token.id for token in session.stream(asked(prompt, GREEDY, 20), stats)]
        assert [run.n_rows for run in stats.runs[: len(chunks)]] == chunks
        assert tokens == expected


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_an_abandoned_request_is_out_of_the_way(n_ranks: int) -> None:
    with ranks(n_ranks) as head:
        session = Session.load(head)
        tokens = session.stream(asked(session.vocab.tokenize("The wolf"), GREEDY, 100))
        next(tokens)
        tokens.close()
        assert text(session, "The wolf", 20) == text(session, "The wolf", 20)


def test_templates_built_into_llama_cpp_know_no_special_tokens_of_users() -> None:
    with ranks(1) as head:
        session = Session.load(head)
        special = next(iter(session.vocab.special_tokens))
        messages = ({"role": "system", "content": "Be kind."}, {"role": "user", "content": f"Hi{special}"})
        prompt = session.tokenize_chat(Conversation(messages=messages, template="llama3"))
        assert prompt.text.endswith(f"Hi{special}<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
        assert session.vocab.special_tokens[special] not in prompt.tokens[1:]
        bare = Conversation(messages=messages, template="llama3", add_generation_prompt=False)
        assert prompt.text.startswith(session.tokenize_chat(bare).text)


@pytest.mark.parametrize(("further", "expected"), [({}, "False"), ({"enable_thinking": True}, "True")])
def test_no_reasoning_within_a_grammar(further: dict[str, Any], expected: str) -> None:
    template = "{{ enable_thinking }}{% if enable_thinking %}<think>{% endif %}"
    prompt = Conversation(messages=({"role": "user", "content": "Hi"},), template=template, further=further)
    with ranks(1) as head:
        session = Session.load(head)
        assert session.tokenize_chat(prompt).text == "True<think>"
        reader = session.engine.prompts
        read = reader.read(prompt, replace(GREEDY, grammar='root ::= "a"'))
        assert read.tokens == session.vocab.tokenize(expected + ("<think>" if further else ""))


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_loading_can_be_stopped(mode: LoadMode) -> None:
    config = ModelConfig(path=TARGET, load_mode=mode)
    with pytest.raises(RunError, match="stopped"):
        Stage(ModelFile.open(TARGET), (0, 8), config, ContextConfig(n_ctx=256), (1, 1), lambda _done, _all: False)


def test_a_stop_while_loading_ends_the_session() -> None:
    with ranks(2) as head:
        head.stop()
        with pytest.raises(RunError, match="while loading"):
            Session.load(head)


def test_a_session_serves_one_request_at_a_time() -> None:
    with ranks(1) as head:
        session = Session.load(head)
        first = session.stream(asked(session.vocab.tokenize("The wolf"), GREEDY, 5))
        next(first)
        with pytest.raises(UsageError, match="one request at a time"):
            next(session.stream(asked(session.vocab.tokenize("Once"), GREEDY, 5)))
        assert len(list(first)) == 4
        assert len(list(session.stream(asked(session.vocab.tokenize("Once"), GREEDY, 5)))) == 5


@pytest.mark.parametrize("mode", ["iterative", "speculative", "async"])
@pytest.mark.parametrize("n_ranks", [1, 2])
def test_an_iterator_that_is_closed_at_its_last_token(n_ranks: int, mode: Mode) -> None:
    with ranks(n_ranks, drafts=mode != "iterative") as head:
        session = Session.load(head)
        tokens = session.stream(asked(session.vocab.tokenize("The wolf"), GREEDY, 5, SpeculationConfig(mode=mode)))
        for _ in range(5):
            next(tokens)
        tokens.close()
        assert text(session, "The wolf", 5) == text(session, "The wolf", 5)


def test_an_iterator_that_outlives_its_session() -> None:
    with ranks(2) as head:
        session = Session.load(head)
        tokens = session.stream(asked(session.vocab.tokenize("The wolf"), GREEDY, 100))
        next(tokens)
    tokens.close()

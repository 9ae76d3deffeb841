"""Texts that a grammar holds, in every mode: right, and the same as without draft tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from support.commands import TARGET
from support.grammars import GRAMMARS, SCHEMAS, fits
from support.pipeline import local_session
from support.requests import asked

from ggpipe.channel.client import ClientRequest
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
from ggpipe.errors import SettingError, UsageError
from ggpipe.stats.records import RequestStats

PROMPT = "Once upon a time"
SELECTED = (
    SamplingConfig(temp=1.0, seed=11, top_k=0, top_p=1.0, min_p=0.0),
    SamplingConfig(temp=1.5, seed=12, top_k=0, top_p=1.0, min_p=0.05),
)
"""The last rank selects tokens of its rows."""
MODES = (
    SpeculationConfig(mode="iterative"),
    SpeculationConfig(mode="speculative", n_draft=4, n_parallel=2, n_seq=4),
    SpeculationConfig(mode="async", n_draft=4, n_parallel=2, n_seq=4),
)


GRAMMAR = 2
"""Id of the drafter that drafts what grammars force: after the draft model's, and n-grams."""
FORCED = (
    SpeculationConfig(mode="async"),
    SpeculationConfig(mode="async", drafters=("grammar",)),
    SpeculationConfig(mode="speculative", drafters=("ngram", "grammar")),
    SpeculationConfig(mode="async", drafters=("draft", "grammar"), policy="thresholds"),
)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks and a draft model. `exact`: so draft tokens change no bit."""
    context = ContextConfig(n_ctx=2048, n_seq=4, exact=True)
    draft = DraftConfig(model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")), context=context)
    config = EngineConfig(ModelConfig(path=TARGET), context, PipelineConfig(threads=(1,)), (draft,), n_requests=4)
    with local_session(config, 2) as session:
        yield session


def answered(session: Session, requests: list[ClientRequest]) -> list[str]:
    while any(request.is_active for request in requests):
        session.step()
    for request in requests:
        if request.error is not None:
            raise request.error
    return ["".join(token.text for token in request.tokens) + request.rest for request in requests]


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_are_right_and_the_same_in_every_mode(name: str, session: Session) -> None:
    prompt = session.tokenize(PROMPT)
    sampling = SamplingConfig(temp=1.0, seed=11, grammar=GRAMMARS[name].grammar)
    stats = [RequestStats() for _ in MODES]
    texts = set()
    for mode, own in zip(MODES, stats, strict=True):
        texts.update(answered(session, [session.submit(asked(prompt, sampling, 120, mode), own)]))
    assert len(texts) == 1
    if stats[0].finish is Finish.END_OF_TEXT:
        assert GRAMMARS[name].is_right(texts.pop())


@pytest.mark.parametrize("name", GRAMMARS)
@pytest.mark.parametrize("sampling", SELECTED, ids=["drawn there", "min-p"])
def test_outputs_are_those_of_whole_rows(name: str, sampling: SamplingConfig, session: Session) -> None:
    """Where the last rank selects tokens that may not fit."""
    prompt, sampling = session.tokenize(PROMPT), replace(sampling, grammar=GRAMMARS[name].grammar)
    whole = session.submit(asked(prompt, replace(sampling, n_probs=1), 90, MODES[0]))
    (text,) = answered(session, [whole])
    requests = [session.submit(asked(prompt, sampling, 90, mode)) for mode in MODES]
    assert answered(session, requests) == [text] * len(MODES)
    assert {request.continued.redrawn for request in requests} == {whole.continued.redrawn}


@pytest.mark.parametrize("name", ["person", "few", "union"])
def test_what_a_schema_forces_is_drafted(name: str, session: Session) -> None:
    prompt, sampling = session.tokenize(PROMPT), SamplingConfig(temp=1.0, seed=4, json_schema=json.dumps(SCHEMAS[name]))
    texts, rights = set(), list[int]()
    for mode in (MODES[0], *FORCED):
        stats = RequestStats()
        texts.update(answered(session, [session.submit(asked(prompt, sampling, 150, mode), stats)]))
        rights.append(stats.counters.by_drafter.get(GRAMMAR, [0, 0])[1])
    assert len(texts) == 1
    assert rights[0] == 0
    assert all(rights[1:])


def test_what_a_schema_forces_is_drafted_without_a_draft_model() -> None:
    config = EngineConfig(ModelConfig(path=TARGET), ContextConfig(n_ctx=1024, n_seq=2), n_requests=2)
    with local_session(config, 2) as session:
        prompt, sampling = session.tokenize(PROMPT), SamplingConfig(temp=0, json_schema=json.dumps(SCHEMAS["person"]))
        iterative, stats = RequestStats(), RequestStats()
        both = (MODES[0], iterative), (SpeculationConfig(), stats)
        texts = answered(session, [session.submit(asked(prompt, sampling, 100, mode), own) for mode, own in both])
    assert texts[0] == texts[1]
    assert stats.counters.by_drafter[1][1] > 0
    assert stats.counters.accepted_tokens > 0
    assert not iterative.counters.by_drafter


def test_there_is_no_drafting_without_a_schema(session: Session) -> None:
    """Where only grammars could be drafted from."""
    prompt, stats = session.tokenize(PROMPT), RequestStats()
    grammar = SamplingConfig(temp=0, grammar=GRAMMARS[next(iter(GRAMMARS))].grammar)
    for sampling in (SamplingConfig(temp=0), grammar):
        answered(session, [session.submit(asked(prompt, sampling, 20, FORCED[1]), stats)])
        assert (stats.counters.by_drafter, stats.speculation.mode) == ({}, "iterative")


def test_requests_with_different_grammars_share_the_pipeline(session: Session) -> None:
    prompt = session.tokenize(PROMPT)
    names = ("person", "few", "union", "types", "patterns", "bounds")
    requests = [
        session.submit(
            asked(prompt, SamplingConfig(temp=1.0, seed=2, json_schema=json.dumps(SCHEMAS[name])), 200, MODES[2])
        )
        for name in names
    ]
    requests.append(session.submit(asked(prompt, SamplingConfig(temp=1.0, seed=2), 40, MODES[2])))
    texts = answered(session, requests)
    for name, text, request in zip(names, texts, requests, strict=False):
        assert request.stats.finish is Finish.END_OF_TEXT
        assert fits(text, SCHEMAS[name]), text


def test_a_hostile_schema_delays_no_others(session: Session) -> None:
    prompt = session.tokenize(PROMPT)
    slow = json.dumps({"allOf": [{"required": [f"p{i}_{n}" for i in range(9000)]} for n in range(9)]})
    hostile = session.submit(asked(prompt, SamplingConfig(json_schema=slow), 20))
    again = session.submit(asked(prompt, SamplingConfig(json_schema=slow), 20))
    other = session.submit(asked(prompt, SamplingConfig(temp=0, json_schema='{"const": [1, 2]}'), 20))
    plain = session.submit(asked(prompt, SamplingConfig(temp=0), 20))
    left = session.submit(asked(prompt, SamplingConfig(json_schema=slow + " "), 20))
    while other.is_active or plain.is_active:
        session.step()
    assert (hostile.accepted, hostile.is_active) == (None, True)
    assert json.loads("".join(token.text for token in other.tokens)) == [1, 2]
    session.cancel(left)
    while left.is_active:
        session.step()
    assert left.stats.finish is Finish.STOPPED
    assert hostile.is_active
    with pytest.raises(UsageError, match=r"`json_schema` takes more than (5 s to read|2 GiB of memory)"):
        answered(session, [hostile, again])
    assert str(again.error) == str(hostile.error)


def test_schemas_that_are_not_followed_are_refused(session: Session) -> None:
    prompt = session.tokenize(PROMPT)
    request = session.submit(asked(prompt, SamplingConfig(json_schema='{"not": {}}'), 20))
    with pytest.raises(SettingError, match="`json_schema` has 'not', which is not supported"):
        answered(session, [request])
    schema = '{"type": "null", "nullable": true}'
    request = session.submit(asked(prompt, SamplingConfig(json_schema=schema), 20))
    assert answered(session, [request]) == ["null"]
    assert request.accepted is not None
    (warning,) = request.accepted.warnings
    assert str(warning) == "`json_schema` ignores keywords that the standard does not define: 'nullable'"


def test_draft_tokens_that_do_not_fit_are_not_submitted(session: Session) -> None:
    sampling = SamplingConfig(temp=0, grammar="root ::= [0-9]+")  # the draft model says words
    stats = RequestStats()
    mode = replace(MODES[1], drafters=("draft",))  # n-grams know digits of other tests' outputs
    text = "".join(token.text for token in session.stream(asked(session.tokenize(PROMPT), sampling, 24, mode), stats))
    assert text.isdecimal()
    assert stats.counters.drafted_tokens > 0
    assert stats.counters.submitted_tokens == 0


@pytest.mark.parametrize("own", [SamplingConfig(temp=1.0), *SELECTED], ids=["default", "drawn there", "min-p"])
def test_a_resumed_request_goes_on_as_before(own: SamplingConfig, session: Session) -> None:
    sampling = replace(own, seed=4, grammar=GRAMMARS["words"].grammar)
    prompt = session.tokenize(PROMPT)
    whole = session.submit(asked(prompt, sampling, 40))
    answered(session, [whole])
    n = len(whole.tokens) // 2
    known = tuple(token.id for token in whole.tokens[:n])
    redrawn = tuple(i for i, token in enumerate(whole.tokens[:n]) if token.redrawn)
    assert redrawn
    rest = session.submit(asked(prompt, sampling, 40, resumed=known, redrawn=redrawn))
    answered(session, [rest])
    assert rest.token_ids == whole.token_ids
    assert rest.continued.redrawn == whole.continued.redrawn


def test_bad_grammars_end_their_requests_only(session: Session) -> None:
    prompt = session.tokenize(PROMPT)
    bad = session.submit(asked(prompt, SamplingConfig(grammar='root ::= root "a" | "b"'), 20))
    good = session.submit(asked(prompt, SamplingConfig(grammar='root ::= "b"'), 20))
    stuck = session.submit(asked(prompt, SamplingConfig(grammar='root ::= "b"', ignore_eos=True), 20))
    with pytest.raises(UsageError, match="begins with itself"):
        answered(session, [good, stuck, bad])
    assert ["".join(token.text for token in request.tokens) for request in (good, stuck)] == ["b", "b"]
    assert (good.stats.finish, stuck.stats.finish) == (Finish.END_OF_TEXT, Finish.NO_TOKEN)


def test_a_group_keeps_whole_rows() -> None:
    sampling = SamplingConfig(temp=1.0, seed=6, grammar="root ::= [0-9]{12}")  # few tokens fit
    context = ContextConfig(n_ctx=256)
    for sizes in ((2,), (1, 2)):
        pipeline = PipelineConfig(layer_split=LayerSplit((1 / len(sizes),) * len(sizes), sizes), threads=(1,))
        with local_session(EngineConfig(ModelConfig(path=TARGET), context, pipeline), sum(sizes)) as session:
            tokens = list(session.stream(asked(session.tokenize(PROMPT), sampling, 40)))
            assert len("".join(token.text for token in tokens)) == 12
            assert any(token.redrawn for token in tokens)

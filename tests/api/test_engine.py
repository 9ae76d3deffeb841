"""`ggpipe.Engine`: requests from threads and event loops, early ends, bad input."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.commands import TARGET, marked, processes_with, wait_for

import ggpipe
from ggpipe import Engine, Finish
from ggpipe.api.arguments import NAMES, ROWS
from ggpipe.options.commands import COMMANDS
from ggpipe.options.table import OPTIONS

PROMPT = "Once upon a time"
SIGNALS = set(signal.Signals) - {signal.SIGALRM}  # pytest-timeout's
N_CTX = 16384  # more than is generated before a test cancels a request
TOO_LONG = "word " * 20_000
OPTIONS_OF_ALL: dict[str, Any] = {"n_ctx": N_CTX, "threads": 1, "temp": 0.0, "n_predict": 12}


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    with Engine(TARGET, n_requests=8, **OPTIONS_OF_ALL) as engine:
        yield engine
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


def text_of(engine: Engine, prompt: str = PROMPT) -> str:
    return engine.generate(prompt).wait().text


# Requests


def test_an_answer_is_its_tokens(engine: Engine) -> None:
    answer = engine.generate(PROMPT)
    assert "".join(token.text for token in answer) == answer.text
    assert (answer.finish, answer.error, answer.is_done) == (Finish.LENGTH, None, True)
    assert [token.id for token in answer] == [token.id for token in answer.tokens]  # again from the first
    assert answer.stats.n_prompt == 6
    assert answer.stats.n_generated == len(answer.tokens) == 12


def test_options_of_one_request(engine: Engine) -> None:
    answer = engine.generate(PROMPT, n_predict=3, stop="\\n", temp=1, seed=5).wait()
    assert (len(answer.tokens), answer.stats.seed) == (3, 5)


def test_grammars_and_probabilities(engine: Engine) -> None:
    schema: dict[str, object] = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    answer = engine.generate(PROMPT, n_predict=100, json_schema=schema, n_probs=2).wait()
    assert set(json.loads(answer.text)) == {"n"}
    assert all(len(token.probs) == 3 for token in answer)


def test_tokens_are_a_prompt(engine: Engine) -> None:
    first = engine.generate(PROMPT, n_predict=5).wait()
    ids = [token.id for token in first.tokens]
    assert engine.generate(ids, n_predict=2).wait().stats.n_prompt == 5


def test_embeddings(engine: Engine) -> None:
    """Embeddings of many prompts, during a request. `last` uses the last token."""
    answer = engine.generate(PROMPT, n_predict=50)
    texts = [f"{PROMPT} there were {n} kings" for n in range(20)]
    found = engine.embed(texts, pooling="last")
    assert [float(vector @ vector) for vector in found] == pytest.approx([1] * 20, abs=1e-5)
    (rows,) = engine.embed(texts[3:4], pooling="none", normalize=-1)
    np.testing.assert_allclose(rows[-1] / np.linalg.norm(rows[-1]), found[3], atol=0.01)
    (mean,) = asyncio.run(engine.embed_async(texts[3:4], pooling="mean", normalize=-1))
    np.testing.assert_allclose(mean, rows.mean(axis=0), atol=0.02)
    (first,) = engine.embed(texts[3:4], pooling="cls", normalize=0)
    assert abs(first).max() == pytest.approx(32760)
    assert len(answer.wait().tokens) == 50
    with pytest.raises(ggpipe.SettingError, match="`pooling` is missing"):
        engine.embed([PROMPT])
    with pytest.raises(ggpipe.UsageError, match="the prompt is empty"):
        engine.embed([[5], []], pooling="last")
    assert engine.embed([], pooling="last") == []


def test_several_threads(engine: Engine) -> None:
    prompts = [PROMPT, "There was a king", "A wolf", "In the forest"]
    alone = [text_of(engine, prompt) for prompt in prompts]
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = "".join(token.text for token in engine.generate(prompts[i]))

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(found[i]) > 0 for i in range(4)] == [True] * 4
    assert found[0][:3] == alone[0][:3]  # near-ties may be decided differently with other requests


def test_eight_on_an_event_loop(engine: Engine) -> None:
    async def text() -> str:
        return "".join([token.text async for token in engine.generate(PROMPT)])

    async def texts() -> list[str]:
        return await asyncio.gather(*(text() for _ in range(8)))

    found = asyncio.run(texts())
    assert len(found) == 8
    assert all(found)


def test_a_cancelled_task_cancels_its_request(engine: Engine) -> None:
    async def late() -> ggpipe.Answer:
        answer = engine.generate(PROMPT, n_predict=-1, ignore_eos=True)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(answer, 0.05)
        return await answer

    assert asyncio.run(late()).finish is Finish.STOPPED


def test_a_left_loop_cancels(engine: Engine) -> None:
    answer = engine.generate(PROMPT, n_predict=-1, ignore_eos=True)
    for _ in answer:
        break
    assert answer.wait().finish is Finish.STOPPED


def test_a_left_with_block_cancels(engine: Engine) -> None:
    with engine.generate(PROMPT, n_predict=-1, ignore_eos=True) as answer:
        next(iter(answer))
    assert answer.wait().finish is Finish.STOPPED


def test_a_dropped_answer_is_cancelled(engine: Engine) -> None:
    answer = engine.generate(PROMPT, n_predict=-1, ignore_eos=True)
    feed = answer._feed
    del answer
    gc.collect()
    feed.wait(None)
    assert feed.stats.finish is Finish.STOPPED


def test_a_conversation(engine: Engine) -> None:
    answer = engine.chat([{"role": "user", "content": "Tell me a tale."}]).wait()
    assert answer.content.strip() == answer.text.strip()
    assert answer.reasoning == ""
    with pytest.raises(ggpipe.UsageError, match="must be objects"):
        engine.chat(["hello"])  # type: ignore[list-item]


def test_a_batch_keeps_the_order(engine: Engine) -> None:
    prompts = [PROMPT, TOO_LONG, "There was a king"] * 8
    answers = list(engine.batch(prompts, n_predict=2))
    assert [answer.prompt for answer in answers] == prompts
    assert [answer.error is None for answer in answers] == [True, False, True] * 8

    async def first() -> str:
        async for answer in engine.batch(prompts, n_predict=2):
            return answer.text
        raise AssertionError

    assert asyncio.run(first()) == answers[0].text


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"ctx_size": 5}, "`ctx_size` is not an option: did you mean `n_ctx`?"),
        ({"no_such": 5}, "`no_such` is not an option"),
        ({"n_ctx": "big"}, "`n_ctx` must be a whole number, got 'big'"),
        ({"n_ctx": -5}, "`n_ctx` must be"),
        ({"exact": 1}, "`exact` must be True or False, got 1"),
        ({"temp": float("nan")}, "`temp` must be a finite number, got nan"),
        ({"layer_split": "half"}, "`layer_split` half: give one share per rank"),
        ({"flash_attn": "no"}, "`flash_attn` must be on, off or auto, got no"),
        ({"layer_split": "1/1"}, "needs a draft model: name one with `draft`"),
        ({"n_requests": 0}, "`n_requests` must be"),
        ({"draft": 3}, "`draft` must be a path, got 3"),
    ],
)
def test_a_bad_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ggpipe.UsageError) as caught:
        Engine(TARGET, **options)
    assert message in str(caught.value)


def test_bad_requests(engine: Engine) -> None:
    with pytest.raises(ggpipe.SettingError, match="`n_ctx` is a setting of the engine"):
        engine.generate(PROMPT, n_ctx=5)  # type: ignore[call-arg]
    with pytest.raises(ggpipe.UsageError, match="must be a string or a sequence of tokens, got 5"):
        engine.generate(5)  # type: ignore[arg-type]
    for several in (engine.batch, engine.embed):
        with pytest.raises(ggpipe.UsageError, match=r"a list of strings, got one string: write \['Once upon a time'\]"):
            several(PROMPT)
    with pytest.raises(ggpipe.UsageError, match="raise `n_ctx`"):
        engine.generate(TOO_LONG).wait()
    assert text_of(engine)


def test_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    (name,) = marked("no-such-model.gguf")
    monkeypatch.setenv(name, "no-such-model.gguf")
    with pytest.raises(ggpipe.ModelError, match=r"no-such-model\.gguf: No such file"):
        Engine("no-such-model.gguf").load()
    wait_for(lambda: not processes_with("no-such-model.gguf"))


def test_not_under_mpirun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    with pytest.raises(ggpipe.LaunchError, match="started by mpirun"):
        Engine(TARGET)


def test_a_closed_engine() -> None:
    engine = Engine(TARGET, **OPTIONS_OF_ALL)
    running = engine.generate(PROMPT, n_predict=-1, ignore_eos=True)
    next(iter(engine.generate(PROMPT)))
    engine.close()
    for answer in (running, engine.generate(PROMPT)):
        with pytest.raises(ggpipe.RunError, match="the engine is closed"):
            answer.wait()
    assert [type(answer.error) for answer in engine.batch([PROMPT] * 20)] == [ggpipe.RunError] * 20
    engine.close()


def test_several_draft_models(engine: Engine) -> None:
    drafts = [TARGET.with_name("tales-draft.gguf"), TARGET]
    options = {**OPTIONS_OF_ALL, "layer_split": "1.0/1.0/1.0"}
    with Engine(TARGET, draft=drafts, **options) as own:
        answer = own.generate(PROMPT).wait()
        assert [rank.model for rank in own.ranks] == [0, 1, 2]
    plain = engine.generate(PROMPT).wait()
    assert [(token.id, token.text) for token in answer.tokens] == [(token.id, token.text) for token in plain.tokens]


def test_an_engine_that_only_its_answers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves them, and ends when they are complete."""
    ((name, mark),) = marked(f"kept-{os.getpid()}").items()
    monkeypatch.setenv(name, mark)
    answer = Engine(TARGET, **OPTIONS_OF_ALL).generate(PROMPT)
    gc.collect()
    wait_for(lambda: processes_with(mark))
    assert len(answer.wait().tokens) == 12
    wait_for(lambda: not processes_with(mark))
    assert [len(one.tokens) for one in Engine(TARGET, **OPTIONS_OF_ALL).batch([PROMPT] * 3)] == [12] * 3
    assert answer.text


# Options


def test_all_flags_of_generate_are_keywords() -> None:
    generate = next(command for command in COMMANDS if command.name == "generate")
    names = {NAMES.get(row.name, row.name) for row in generate.options(OPTIONS)}
    of_chat = {"single_turn", "system", "chat_template", "chat_template_file", "chat_template_kwargs", "reasoning"}
    of_the_hub = {"hf_repo", "hf_file", "hf_token", "offline", "draft.hf_repo"}
    of_the_terminal = {"prompt", "file", "escape", "color", "display_prompt", "csv", "json", "trace"}
    assert names - set(ROWS) - of_chat - of_the_hub - of_the_terminal == set()
    parameters = inspect.signature(Engine.chat).parameters
    assert {"chat_template", "chat_template_kwargs"} <= set(parameters)

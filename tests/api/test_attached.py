"""`ggpipe.attach`: the engine of a running `ggpipe serve`, which answers as `ggpipe.Engine` does."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import socket
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.commands import TARGET
from support.servers import DRAFT, Serving, server

import ggpipe
from ggpipe import Answer, AnyEngine, AttachedEngine, Engine, Finish, attach

KEY = "right"
PROMPT = "Once upon a time"
HELLO = [{"role": "user", "content": "Tell me of a king. <|im_end|>"}]
N_CTX = 16384  # more than is generated before a test cancels it, however late that comes
TOO_LONG = "word " * 20_000
ENDLESS: dict[str, Any] = {"n_predict": -1, "ignore_eos": True}
SCHEMA = {"type": "object", "properties": {"n": {"type": "boolean"}}, "required": ["n"]}


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    with server(
        "-md", str(DRAFT), "--mode", "speculative", "-c", str(N_CTX), "-np", "4", "--exact",
        "--api-key", KEY, "--alias", "tales", "--pooling", "mean",
    ) as own:  # fmt: skip
        own.wait_until_ready()
        yield own


@pytest.fixture
def engine(serving: Serving) -> Iterator[AttachedEngine]:
    with attach(serving.url, KEY) as engine:
        yield engine


def test_it_writes_what_an_engine_of_its_own_writes(engine: AttachedEngine) -> None:
    assert (engine.model, engine.n_ctx, engine.n_requests) == ("tales", N_CTX, 4)

    def answers(of: AnyEngine) -> list[Answer]:
        found = [
            of.generate(PROMPT, n_predict=30, temp=0.9, seed=5),
            of.generate("Der König sprach: „", n_predict=20, seed=6, samplers="top_k;temp", top_k=5),
            of.generate(PROMPT, n_predict=40, seed=7, stop=["the", "a "], logit_bias="12-inf"),
            of.generate(PROMPT, n_predict=100, seed=8, json_schema=SCHEMA),
            of.chat(HELLO, n_predict=12, seed=9, repeat_penalty=1.2),
            of.generate([5, 6, 7], n_predict=3, temp=0, seed=10, n_probs=2),
        ]
        return [answer.wait() for answer in found]

    found = answers(engine)
    with Engine(TARGET, draft=DRAFT, n_ctx=N_CTX, n_requests=4, threads=1, exact=True, live=False) as own:
        expected = answers(own)
        embeddings = own.embed([PROMPT, [5, 6, 7]], pooling="mean")
    for answer, other in zip(found, expected, strict=True):
        assert (answer.text, answer.content, answer.finish) == (other.text, other.content, other.finish)
        assert [token.id for token in answer.tokens] == [token.id for token in other.tokens]
        assert [token.text for token in answer.tokens] == [token.text for token in other.tokens]
        assert (answer.stats.seed, answer.stats.n_prompt) == (other.stats.seed, other.stats.n_prompt)
        assert answer.stats.n_generated == len(answer.tokens)
    for vector, expected_vector in zip(engine.embed([PROMPT, [5, 6, 7]]), embeddings, strict=True):
        np.testing.assert_array_equal(vector, expected_vector)
    with pytest.raises(ggpipe.SettingError, match="`pooling` is a setting of the server"):
        engine.embed([PROMPT], pooling="last")
    assert json.loads(found[3].text).keys() == {"n"}
    for token, twin in zip(found[-1].tokens, expected[-1].tokens, strict=True):
        assert token.probs == twin.probs != ()
    alone = engine.generate(PROMPT, n_predict=40, temp=0).wait()  # in company there may be no room for draft tokens
    assert alone.stats.counters.submitted_tokens > 0


def test_probabilities_of_the_draw(engine: AttachedEngine) -> None:
    answer = engine.generate(PROMPT, n_predict=2, n_probs=3, post_sampling_probs=True, top_k=2, min_p=0).wait()
    for token in answer.tokens:
        assert token.probs[0].id == token.id
        assert sum(math.exp(one.logprob) for one in token.probs[1:]) == pytest.approx(1, abs=1e-3)


def test_leaving_cancels(engine: AttachedEngine) -> None:
    left = engine.generate(PROMPT, **ENDLESS)
    for _ in left:
        break
    with engine.generate(PROMPT, **ENDLESS) as block:
        next(iter(block))
    dropped = engine.generate(PROMPT, **ENDLESS)._feed
    gc.collect()
    dropped.wait(None)
    assert [left.wait().finish, block.wait().finish, dropped.stats.finish] == [Finish.STOPPED] * 3
    assert engine.generate(PROMPT, n_predict=2).wait().finish is Finish.LENGTH


def test_four_on_an_event_loop(serving: Serving) -> None:
    async def texts() -> list[str]:
        async with attach(serving.url, KEY) as engine:
            late = engine.generate(PROMPT, **ENDLESS)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(late, 0.05)
            assert (await late).finish is Finish.STOPPED

            async def text() -> str:
                return "".join([token.text async for token in engine.generate(PROMPT, n_predict=8, temp=0)])

            found = await asyncio.gather(*(text() for _ in range(4)))
            return [*found, (await engine.generate(PROMPT, n_predict=8, temp=0)).text]

    found = asyncio.run(texts())
    assert found == [found[0]] * 5
    assert found[0]


def test_a_batch_keeps_the_order(engine: AttachedEngine) -> None:
    prompts = [PROMPT, TOO_LONG, "There was a king"] * 3
    answers = list(engine.batch(prompts, n_predict=2))
    assert [answer.prompt for answer in answers] == prompts
    assert [answer.error is None for answer in answers] == [True, False, True] * 3


def test_a_closed_one(serving: Serving) -> None:
    engine = attach(serving.url, KEY)
    running = engine.generate(PROMPT, **ENDLESS)
    engine.close()
    for answer in (running, engine.generate(PROMPT)):
        with pytest.raises(ggpipe.RunError, match="the engine is closed"):
            answer.wait()
    assert [type(answer.error) for answer in engine.batch([PROMPT] * 20)] == [ggpipe.RunError] * 20
    engine.close()


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1}, "`temperature` is not an option: did you mean `temp`?"),
        ({"temp": float("nan")}, "`temp` must be a finite number, got nan"),
        ({"n_ctx": 5}, "`n_ctx` is a setting of the engine"),
        ({"mode": "iterative"}, "`mode` is a setting of the server, for all requests"),
        ({"logit_bias": "99999999+1"}, "`logit_bias`"),
        ({"grammar": 'root ::= "'}, "`grammar`"),
    ],
)
def test_a_bad_option(engine: AttachedEngine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ggpipe.UsageError) as caught:
        engine.generate(PROMPT, **options).wait()
    assert message in str(caught.value)


def test_bad_prompts(engine: AttachedEngine) -> None:
    for prompt, message in ((TOO_LONG, "the prompt has"), ("\ud800", "JSON"), ([-1], r"`prompt\[0\]`")):
        with pytest.raises(ggpipe.UsageError, match=message):
            engine.generate(prompt).wait()
    with pytest.raises(ggpipe.UsageError, match="`messages` is empty"):
        engine.chat([]).wait()
    with pytest.raises(ggpipe.SettingError, match="`chat_template` is a setting of the server"):
        engine.chat(HELLO, chat_template="chatml")


def test_bad_servers(serving: Serving) -> None:
    with pytest.raises(ggpipe.SettingError, match=r"`api_key`: http://.* refuses it: Invalid API Key"):
        attach(serving.url, "wrong")
    with pytest.raises(ggpipe.UsageError, match="the address of a server must be"):
        attach("ftp://nowhere")
    with pytest.raises(ggpipe.UsageError, match="is no `ggpipe serve`"):
        attach(f"{serving.url}/elsewhere", KEY)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ggpipe.RunError, match=f"cannot connect to http://127.0.0.1:{port}: Connection refused"):
        attach(f"127.0.0.1:{port}")


def test_a_server_that_is_killed() -> None:
    with server("-c", str(N_CTX)) as own:
        own.wait_until_ready()
        engine = attach(own.url)
        answer = engine.generate(PROMPT, **ENDLESS)
        tokens = iter(answer)
        next(tokens)
        own.process.kill()
        own.process.wait()
        with pytest.raises(ggpipe.RunError, match=f"the connection to {own.url} was lost"):
            list(tokens)
        with pytest.raises(ggpipe.RunError, match="is `ggpipe serve` there"):
            engine.generate(PROMPT).wait()

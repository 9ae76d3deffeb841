"""Requests and prompts as front ends state them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.requests import asked

from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import Conversation, RequestPrompt, ToolChoice, as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import UsageError

SAID = Conversation(
    messages=({"role": "user", "content": "Hi"},), choice=ToolChoice(must_call=True), further={"enable_thinking": False}
)


@pytest.mark.parametrize(
    ("given", "prompt"),
    [
        ("caf\u00e9", "caf\u00e9".encode()),
        ("caf\udce9", b"caf\xe9"),
        ([5, 6], (5, 6)),
        ([5, "a", 6], (5, b"a", 6)),
        (SAID, SAID),
    ],
    ids=["text", "no UTF-8", "tokens", "mixed", "conversation"],
)
def test_prompts_as_users_give_them(given: Any, prompt: RequestPrompt) -> None:
    assert as_prompt(given) == prompt


def test_a_text_that_cannot_be_bytes() -> None:
    with pytest.raises(UsageError, match="cannot be passed on to the model"):
        as_prompt("a\ud800")


@pytest.mark.parametrize("prompt", ["a text", [5, 6], None])
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(UsageError, match=f"got {type(prompt).__name__}"):
        RequestSpec(prompt=prompt)


@pytest.mark.parametrize("prompt", [b"caf\xe9", (5, 6), (5, b"a"), SAID])
def test_requests_travel_whole(prompt: RequestPrompt) -> None:
    spec = asked(
        prompt,
        SamplingConfig(temp=0.3, logit_bias=((5, float("-inf")),)),
        7,
        SpeculationConfig(mode="speculative"),
        resumed=(1, 2),
        redrawn=(1,),
        pooling="mean",
        user="me",
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=RequestSpec) == spec

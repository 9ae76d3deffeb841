"""Official clients of a module's server, which is its fixture `serving`, with its `KEY`."""

from __future__ import annotations

from collections.abc import Iterator

import anthropic
import openai
import pytest
from support.servers import Serving

LIMIT_S = 120


def key_of(request: pytest.FixtureRequest) -> str:
    found: str = getattr(request.module, "KEY", "none")
    return found


@pytest.fixture
def client(serving: Serving, request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{serving.url}/v1", api_key=key_of(request), max_retries=0, timeout=LIMIT_S
    ) as own:  # fmt: skip
        yield own


@pytest.fixture
def claude(serving: Serving, request: pytest.FixtureRequest) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=serving.url, api_key=key_of(request), max_retries=0, timeout=LIMIT_S) as own:
        yield own

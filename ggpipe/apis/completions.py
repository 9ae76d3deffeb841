"""OpenAI's `/v1/completions`: the body, with its prompts, and the choices of the reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from ggpipe.apis.bodies import MOST_CHOICES, BodyPrompt, GenerationBody, Mixed, TokenId
from ggpipe.apis.replies import Choices, text_logprobs
from ggpipe.core.request import Token
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.tools.events import AnswerEvent, Text

COMPLETIONS = "/v1/completions"


class PromptObject(msgspec.Struct, kw_only=True):
    """llama-server's form of a prompt that may have more than text."""

    prompt_string: str
    multimodal_data: list[str] | None = None


PromptField = str | PromptObject | list[TokenId | str | list[TokenId | str] | PromptObject]
"""One prompt, or several where a list has no token in itself."""


def prompts_of(given: PromptField) -> Sequence[BodyPrompt]:
    """The prompts of a body. Raises BodyError."""
    if not isinstance(given, list):
        return [_prompt(given, "prompt")]
    if not given or any(isinstance(part, int) for part in given):
        parts = [part for part in given if isinstance(part, int | str)]
        if len(parts) == len(given):
            return [_prompt(parts, "prompt")]
    elif len(given) <= MOST_CHOICES:
        return [_prompt(one, f"prompt[{i}]") for i, one in enumerate(given) if not isinstance(one, int)]
    raise BodyError(
        f"`prompt` must be a text, a list of tokens and texts, or at most {MOST_CHOICES} of these", "prompt"
    )  # fmt: skip


def _prompt(one: str | PromptObject | list[int | str], at: str) -> BodyPrompt:
    match one:
        case PromptObject(prompt_string=text, multimodal_data=data):
            if data:
                raise BodyError(f"`{at}.multimodal_data` is not supported: the model reads nothing but text", at)
            return text
        case list() as parts:
            tokens = [part for part in parts if isinstance(part, int)]
            return tokens if len(tokens) == len(parts) else Mixed(tuple(parts))
    return one


class CompletionBody(GenerationBody, kw_only=True):
    """`/v1/completions`."""

    prompt: PromptField
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)

    def check(self) -> None:
        """Raises BodyError for what no request can have, and for what is not done here."""
        super().check()
        for name, wanted in (
            ("echo", self.echo), ("suffix", self.suffix), ("best_of", self.best_of not in (None, self.n_choices)),
        ):  # fmt: skip
            if wanted:
                raise BodyError(f"`{name}` is not supported: leave it out", name)


class CompletionChoices(Choices):
    """The reply to `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    empty: ClassVar[Mapping[str, Any]] = {"text": ""}

    def __init__(self, model: str, n_best: int | None, identity: str = "", **further: Any) -> None:
        super().__init__(model, n_best, identity, **further)
        self._n_chars: dict[int, int] = {}
        """Characters of each output's tokens whose log-probabilities were returned."""

    def part(self, one: AnswerEvent) -> dict[str, Any] | None:
        return {"text": one.text} if isinstance(one, Text) else None

    def logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        found = text_logprobs(tokens, self.n_best, self._n_chars.get(index, 0))
        if found is not None:
            self._n_chars[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found

    def _whole(self, answer: WholeAnswer) -> dict[str, Any]:
        return {"text": answer.text}

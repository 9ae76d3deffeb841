"""OpenAI's `/v1/completions`: the body, with its prompts, and the choices of the reply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from ggpipe.apis.bodies import MOST_CHOICES, BodyPrompt, GenerationBody, TokenId
from ggpipe.apis.replies import ChoiceWriter, text_logprobs
from ggpipe.apis.writer import ApiEvent, Output, WrittenOutput
from ggpipe.core.request import Token
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.tools.events import AnswerEvent, Text

COMPLETIONS = "/v1/completions"


class TextPart(msgspec.Struct, kw_only=True):
    """A part of a prompt. There are no others than text."""

    type: Literal["text"]
    text: str


class PromptObject(msgspec.Struct, kw_only=True):
    """llama-server's forms of prompts for multimodal models: a string, or parts."""

    prompt_string: str | None = None
    content: list[TextPart] | None = None
    multimodal_data: Annotated[list[str], msgspec.Meta(max_length=0)] | None = None
    """Not supported."""


PromptField = str | PromptObject | list[TokenId | str | list[TokenId | str] | PromptObject]
"""One prompt, or several if it is a list without token ids on its first level."""


def prompts_of(given: PromptField, name: str = "prompt", most: int = MOST_CHOICES) -> Sequence[BodyPrompt]:
    """The prompts of a body, at most `most`. `name`: of the field. Raises BodyError."""
    if not isinstance(given, list):
        return [_prompt(given, name)]
    if not given or any(isinstance(part, int) for part in given):
        parts = [part for part in given if isinstance(part, int | str)]
        if len(parts) == len(given):
            return [parts]
    elif len(given) <= most:
        return [_prompt(one, f"{name}[{i}]") for i, one in enumerate(given) if not isinstance(one, int)]
    raise BodyError(
        f"`{name}` must be a string, a list of tokens and strings, or at most {most} of these", name
    )  # fmt: skip


def _prompt(one: str | PromptObject | list[int | str], at: str) -> BodyPrompt:
    if not isinstance(one, PromptObject):
        return one
    if (one.prompt_string is None) == (not one.content):
        raise BodyError(f"`{at}` must have either `prompt_string` or a `content` with parts", at)
    return one.prompt_string if one.prompt_string is not None else "".join(part.text for part in one.content or ())


class CompletionBody(GenerationBody, kw_only=True):
    """Body of `/v1/completions`."""

    prompt: PromptField
    echo: bool | None = None
    """Return the prompt before the output."""
    suffix: str | None = None
    best_of: int | None = None

    @property
    def prompts(self) -> Sequence[BodyPrompt]:
        return prompts_of(self.prompt)

    def __post_init__(self) -> None:
        for name, wanted in (("suffix", self.suffix), ("best_of", self.best_of not in (None, self.n_choices))):
            if wanted:
                raise BodyError(f"`{name}` is not supported: leave it out", name)
        if self.echo and not all(isinstance(prompt, str) for prompt in self.prompts):
            raise BodyError("`echo` needs prompts that are strings", "echo")
        if self.echo and self.logprobs not in (None, False):
            raise BodyError("`echo` and `logprobs` cannot be combined: prompts have no log-probabilities", "echo")

    def echoed(self, prompt: int) -> str:
        """What comes before the outputs of this prompt."""
        found = self.prompts[prompt] if self.echo else ""
        return found if isinstance(found, str) else ""


class CompletionWriter(ChoiceWriter):
    """The reply to `/v1/completions`."""

    prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"
    empty: ClassVar[dict[str, Any]] = {"text": ""}

    def __init__(self, body: GenerationBody, model: str, **further: Any) -> None:
        super().__init__(body, model, **further)
        self._echoed = body.echoed if isinstance(body, CompletionBody) else lambda _: ""
        self._n_chars: dict[int, int] = {}
        """Characters of each output's tokens whose log-probabilities were returned."""

    def begin(self, output: Output) -> Iterator[ApiEvent]:
        yield from super().begin(output)
        if text := self._echoed(output.prompt):
            yield from self.add(output, [Text(text)], ())

    def whole(self, outputs: Sequence[WrittenOutput], stop_strings: Sequence[str] = ()) -> dict[str, Any]:
        found = super().whole(outputs, stop_strings)
        for output, choice in zip(outputs, found["choices"], strict=True):
            choice["text"] = self._echoed(output.prompt) + choice["text"]
        return found

    def _part(self, one: AnswerEvent) -> dict[str, Any] | None:
        return {"text": one.text} if isinstance(one, Text) else None

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        found = text_logprobs(tokens, self._body.n_best_probs, self._n_chars.get(index, 0))
        if found is not None:
            self._n_chars[index] = found["text_offset"][-1] + len(found["tokens"][-1])
        return found

    def _content(self, answer: WholeAnswer) -> dict[str, Any]:
        return {"text": answer.text}

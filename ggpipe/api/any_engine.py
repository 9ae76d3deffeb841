"""What all engines of a Python program have in common: see `AnyEngine`."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

from ggpipe.api.answer import Answer
from ggpipe.api.arguments import named
from ggpipe.api.batch import Batch, Cancel, Prompt
from ggpipe.api.feed import Feed
from ggpipe.api.keywords import RequestOptions
from ggpipe.config import Pooling
from ggpipe.embeddings import Vector
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.options.chat import Chat
from ggpipe.prompt import Conversation

Submit = Callable[[Prompt | Conversation, Feed], None]
"""Has a prompt continued; what comes of it goes to the feed."""


class AnyEngine(ABC):
    """Continues texts and answers conversations: `Engine` with ranks of its own, `AttachedEngine` by a server.

    Leaving a `with` or `async with` block closes it. All methods may be called from several threads at a time.
    """

    def __init__(self, cancel: Cancel, n_at_a_time: int) -> None:
        """`cancel` ends the request of a feed soon. `n_at_a_time`: requests that a batch has submitted at a time."""
        self._cancel = cancel
        self._n_at_a_time = n_at_a_time

    @abstractmethod
    def load(self) -> Self:
        """Wait until requests are served. Raises what that failed with."""

    @abstractmethod
    def close(self) -> None:
        """End all requests. A second call does nothing."""

    @abstractmethod
    def _submit(self, options: RequestOptions) -> Submit:
        """How prompts are submitted with these options. Raises SettingError, UsageError."""

    async def load_async(self) -> Self:
        """As `load`, for an event loop."""
        return await asyncio.to_thread(self.load)

    def __enter__(self) -> Self:
        return self.load()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await self.load_async()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await asyncio.to_thread(self.close)  # which may wait

    # Requests

    def generate(self, prompt: str | Sequence[int], **options: Unpack[RequestOptions]) -> Answer:
        """Continue a text, or tokens. The request begins at once; see `Answer` for what comes of it.

        Raises SettingError for options that cannot be. A bad prompt is the answer's error.
        """
        _check_prompt(prompt)
        return self._answer(prompt, prompt, options)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Answer a conversation, whose messages, tools and `tool_choice` are as in OpenAI's API.

        `chat_template`: in the Jinja language, or "chatml", instead of the model's own. `chat_template_kwargs`: further
        names for it. Raises as `generate`; what the template refuses is the answer's error.
        """
        try:
            chat = Chat(single_turn=True, template=chat_template, template_kwargs=dict(chat_template_kwargs or {}))
            conversation = chat.of_messages(messages, tools, tool_choice, parallel_tool_calls)
        except GgpipeError as e:
            raise named(e) from None
        return self._answer(messages, conversation, options)

    def batch(self, prompts: Iterable[str | Sequence[int]], **options: Unpack[RequestOptions]) -> Batch:
        """Continue many texts, several at a time: `for answer in engine.batch(prompts)` yields whole answers, in the
        order of the prompts. One whose prompt is bad has an `error`.

        A loop that is left early cancels the others. Raises as `generate`.
        """
        texts, submit = _checked(prompts), self._submit(options)
        return Batch(texts, self._n_at_a_time, submit, lambda feed: self._cancel(feed))  # it keeps the engine

    def embed(
        self, texts: Iterable[str | Sequence[int]], *, pooling: Pooling | None = None, normalize: int = 2
    ) -> list[Vector]:
        """The embedding of each text, several at a time: float32 arrays of the model's width, with the pooling `none`
        one row a token.

        `pooling`: how they are made of the hidden states of a text's tokens; None: as the model's file says.
        `normalize`: 2 gives them the length 1, -1 leaves them, others are as of `ggpipe serve --embd-normalize`.

        Raises SettingError where the model's file does not say how, UsageError for a bad text.
        """
        return self._embed(_checked(texts), pooling, normalize)

    async def embed_async(
        self, texts: Iterable[str | Sequence[int]], *, pooling: Pooling | None = None, normalize: int = 2
    ) -> list[Vector]:
        """As `embed`, for an event loop. It goes on where the task is cancelled."""
        return await asyncio.to_thread(self.embed, texts, pooling=pooling, normalize=normalize)

    @abstractmethod
    def _embed(self, texts: Sequence[Prompt], pooling: Pooling | None, normalize: int) -> list[Vector]: ...

    def _answer(self, prompt: object, text: Prompt | Conversation, options: RequestOptions) -> Answer:
        feed = Feed()
        self._submit(options)(text, feed)
        return Answer(feed, lambda: self._cancel(feed), prompt)


def _checked(prompts: Iterable[Prompt]) -> list[Prompt]:
    """A list of them. Raises UsageError."""
    if isinstance(prompts, str):  # each of its letters would be a prompt
        raise UsageError(f"prompts must be a list of texts, got one text: write [{prompts[:40]!r}]")
    found = list(prompts)
    for prompt in found:
        _check_prompt(prompt)
    return found


def _check_prompt(prompt: object) -> None:
    if isinstance(prompt, str):
        return
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise UsageError(f"a prompt must be a text or a sequence of tokens, got {prompt!r}")

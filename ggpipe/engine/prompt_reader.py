"""Prompts as the model reads them: text and conversations to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation, RequestPrompt
from ggpipe.errors import UsageError
from ggpipe.llama.vocab import Vocab
from ggpipe.text.chat.answer import AnswerFormat, answer_format
from ggpipe.text.chat.conversation import CHATML, ChatPrompt
from ggpipe.text.chat.template import ChatTemplate
from ggpipe.text.chat.tools.grammar import grammar_of_calls
from ggpipe.text.grammar.lark import Marks

_MOST_TEMPLATES = 4  # compiled ones, which take up to a tenth of a second to make: all requests wait meanwhile


@dataclass(frozen=True, kw_only=True)
class ReadPrompt:
    """A prompt that was read."""

    tokens: tuple[int, ...]
    sampling: SamplingConfig
    """How the tokens of its completion are drawn."""
    answer_format: AnswerFormat | None = None
    """How a conversation's answer is marked."""


class PromptReader:
    """Belongs to the head's main thread."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._templates: dict[str, ChatTemplate] = {}
        """By source: a model may have one for tools beside the usual one."""
        self._last: tuple[RequestPrompt, tuple[int, ...] | ChatPrompt] | None = None

    def read(self, prompt: RequestPrompt, sampling: SamplingConfig) -> ReadPrompt:
        """A request's prompt. The same one again, before `forget`, takes no time: several completions are wanted.

        Raises UsageError for what is no token of the model, and where a template does not take a conversation.
        """
        if self._last is None or self._last[0] != prompt:
            self._last = prompt, self._read(prompt)
        match self._last[1]:
            case ChatPrompt() as chat:
                return ReadPrompt(tokens=chat.tokens, sampling=chat.held(sampling), answer_format=chat.answer)
            case tokens:
                return ReadPrompt(tokens=tokens, sampling=sampling)

    def forget(self) -> None:
        """The prompt that was read last is not kept any more."""
        self._last = None

    def _read(self, prompt: RequestPrompt) -> tuple[int, ...] | ChatPrompt:
        try:
            match prompt:
                case bytes():
                    return self.text(prompt)
                case Conversation():
                    return self.conversation(prompt)
            return self._mixed(prompt)
        except (OverflowError, ValueError) as e:  # no UTF-8, a number that is too large
            raise UsageError(f"the request cannot be passed on to the model: {e}") from e

    def _mixed(self, parts: Sequence[int | bytes]) -> tuple[int, ...]:
        """Tokenize a mix of tokens and strings. Only a string at the beginning gets the model's initial tokens, such
        as BOS."""
        begun, tokens = (self.text(b"") if any(isinstance(part, bytes) for part in parts) else ()), list[int]()
        for i, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(part)
            else:
                found = self.text(part)
                tokens += found[len(begun) :] if i and found[: len(begun)] == begun else found
        self.check(tokens)
        return tuple(tokens)

    def text(self, text: bytes) -> tuple[int, ...]:
        """A text's tokens."""
        return self._vocab.tokenize(text.decode("utf-8", "surrogateescape"))

    def check(self, tokens: Sequence[int]) -> None:
        """Raises UsageError for what is no token of the model."""
        wrong = next((token for token in tokens if not 0 <= token < self._vocab.n_tokens), None)
        if wrong is not None:
            raise UsageError(f"the model has no token {wrong}: give numbers from 0 to {self._vocab.n_tokens - 1}")

    def conversation(self, conversation: Conversation) -> ChatPrompt:
        """A conversation's tokens, and what follows from it for the answer. Raises UsageError where the template does
        not take it."""
        conversation.check()
        vocab, tools = self._vocab, conversation.tools
        source = conversation.template or (vocab.template("tool_use") if tools else None) or vocab.template() or CHATML
        template = self._compiled(source)
        own = conversation.begun
        messages = conversation.messages if own is None else conversation.messages[:-1]
        text, begun = template.conversation(messages, tools, **conversation.further)
        answer, choice = answer_format(source, begun, vocab.special_tokens, tools), conversation.choice
        pieces = [*template.pieces(text)]
        if own is not None:
            behind, reasoning = answer.reasoning.begun(own.get("reasoning_content") or "", own.get("content") or "")
            pieces, answer = [*pieces, *behind], replace(answer, reasoning=reasoning)
        marks = Marks(vocab.special_tokens, vocab.end_tokens)
        grammar = grammar_of_calls(answer.form, answer.reasoning, tools, choice, marks)
        written = "".join(piece for piece, _ in pieces)
        return ChatPrompt(vocab.tokenize_pieces(pieces), answer, written, grammar, choice.must_call)

    def _compiled(self, source: str) -> ChatTemplate:
        if source not in self._templates:
            vocab = self._vocab
            template = ChatTemplate(source, vocab.bos_text, vocab.eos_text, vocab.special_texts)
            if len(self._templates) == _MOST_TEMPLATES:
                del self._templates[next(iter(self._templates))]
            self._templates[source] = template
        return self._templates[source]

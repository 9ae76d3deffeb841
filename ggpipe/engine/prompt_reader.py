"""Prompts as the model reads them: text and conversations to tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prompt import Conversation, RequestPrompt
from ggpipe.errors import RunError, UsageError
from ggpipe.llama import built_in_templates
from ggpipe.llama.vocab import Vocab
from ggpipe.text.chat.answer import AnswerFormat, answer_format
from ggpipe.text.chat.built_in import BUILT_IN_TEMPLATES
from ggpipe.text.chat.conversation import CHATML, ChatPrompt
from ggpipe.text.chat.template_process import TemplateProcess
from ggpipe.text.chat.tools.grammar import grammar_of_calls
from ggpipe.text.chat.transcript import text_of
from ggpipe.text.grammar.lark import Marks


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
        self._templates = TemplateProcess(vocab.bos_text, vocab.eos_text, vocab.special_texts)
        self._last: tuple[RequestPrompt, tuple[int, ...] | ChatPrompt] | None = None

    def read(self, prompt: RequestPrompt, sampling: SamplingConfig) -> ReadPrompt:
        """A request's prompt. The same one again, before `forget`, takes no time: several completions are wanted.

        Raises UsageError for what is no token of the model, and where a template does not take a conversation.
        """
        if isinstance(prompt, Conversation) and (sampling.grammar or sampling.json_schema):
            # a grammar holds from the first token on: there is no room for reasoning, where a template has a choice
            prompt = replace(prompt, further={"enable_thinking": False, **prompt.further})
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
        own = conversation.begun
        messages = conversation.messages if own is None else conversation.messages[:-1]
        asks = conversation.add_generation_prompt or own is not None
        text, begun = self._rendered(source, messages, tools, asks, conversation.further)
        answer, choice = answer_format(source, begun, vocab.special_tokens, tools), conversation.choice
        pieces = [*self._templates.pieces(text)]
        if own is not None:
            behind, reasoning = answer.reasoning.begun(own.get("reasoning_content") or "", own.get("content") or "")
            pieces, answer = [*pieces, *behind], replace(answer, reasoning=reasoning)
        marks = Marks(vocab.special_tokens, vocab.end_tokens)
        grammar = grammar_of_calls(answer.form, answer.reasoning, tools, choice, marks)
        written = "".join(piece for piece, _ in pieces)
        return ChatPrompt(vocab.tokenize_pieces(pieces), answer, written, grammar, choice.must_call)

    def _rendered(
        self,
        source: str,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        asks: bool,
        further: Mapping[str, Any],
    ) -> tuple[str, str]:
        if source in BUILT_IN_TEMPLATES:
            written = [(message["role"], text_of(message)) for message in self._templates.in_words(messages, tools)]
            text = built_in_templates.apply(source, written, asks)
            return text, text.removeprefix(built_in_templates.apply(source, written, False)) if asks else ""
        try:
            return self._templates.conversation(source, messages, tools, asks, further)
        except OSError as e:
            raise RunError(f"the process that applies chat templates cannot be started: {e}") from e

    def close(self) -> None:
        """End the process that applies templates. A second call does nothing."""
        self._templates.close()

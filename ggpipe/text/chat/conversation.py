"""A conversation as a model reads it, and what follows from it for the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggpipe.config.sampling import ReasoningMarks, SamplingConfig
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import AnswerFormat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For models whose file has no template."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a model reads it."""

    tokens: tuple[int, ...]
    """Up to where the model's answer begins."""
    answer: AnswerFormat
    """How the model marks reasoning in its answer, and calls tools."""
    text: str = ""
    """What the template wrote."""
    grammar: str = ""
    """What holds the model to calls that can be read, in GBNF; empty: nothing."""
    must_call: bool = False
    """The answer must be a call."""

    def grammar_beside(self, own: str) -> str:
        """The grammar for the answer. `own`: the user's, which comes first. Raises BodyError where it forbids what
        `tool_choice` demands."""
        if own and self.must_call:
            why = "demands a call, which `grammar` or a JSON schema forbids: give one of them"
            raise BodyError(f"`tool_choice` {why}", "tool_choice")
        return own or self.grammar

    def held(self, sampling: SamplingConfig) -> SamplingConfig:
        """Settings with the grammar for the answer, and the marks that a budget needs. Raises as `grammar_beside`."""
        grammar = self.grammar_beside(sampling.grammar)
        if sampling.reasoning_budget >= 0:
            marks = self.answer.reasoning
            own = ReasoningMarks(begins=marks.begins, ends=marks.ends, is_open=marks.is_open)
            sampling = replace(sampling, reasoning_marks=own)
        return sampling if grammar == sampling.grammar else replace(sampling, grammar=grammar)

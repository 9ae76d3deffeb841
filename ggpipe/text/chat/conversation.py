"""A conversation as the prompt of a request, and what it implies for the answer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggpipe.config.sampling import CallGrammar, ReasoningMarks, SamplingConfig
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import AnswerFormat

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The template of models whose file has none."""


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation as a prompt."""

    tokens: tuple[int, ...]
    """All tokens before the model's answer."""
    answer: AnswerFormat
    """How the model marks reasoning and tool calls in its answer."""
    text: str = ""
    """The output of the chat template."""
    grammar: CallGrammar | None = None
    """A grammar that holds the answer to valid tool calls; None: no constraint."""
    must_call: bool = False
    """The answer must be a call."""

    def held(self, sampling: SamplingConfig) -> SamplingConfig:
        """The settings with the answer's grammar, and with the marks that a reasoning budget needs. The user's own
        grammar takes precedence, and so does a schema for the answer, unless a call is required. Raises BodyError if a
        grammar rules out a call that `tool_choice` requires."""
        if self.must_call and sampling.grammar:
            raise BodyError("`tool_choice` demands a call, which `grammar` forbids: give one of them", "tool_choice")
        if self.must_call and sampling.json_schema:
            sampling = replace(sampling, json_schema="")
        has_own = bool(sampling.grammar or sampling.json_schema)
        if sampling.reasoning_budget >= 0:
            marks = self.answer.reasoning
            own = ReasoningMarks(begins=marks.begins, ends=marks.ends, is_open=marks.is_open)
            sampling = replace(sampling, reasoning_marks=own)
        return sampling if has_own or self.grammar is None else replace(sampling, call_grammar=self.grammar)

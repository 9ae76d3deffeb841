"""Renders conversations with templates from model files, in a process with limits of time and memory.

A template is a program: its loops may have no end, and its sandbox does not bound what it allocates.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ggpipe.errors import SettingError, UsageError
from ggpipe.text.chat.conversation import CHATML
from ggpipe.text.chat.literals import Literals, plain_json
from ggpipe.text.chat.tools.messages import for_template
from ggpipe.text.limited_process import Exceeded, LimitedProcess, Limits, answer_questions

if TYPE_CHECKING:
    from ggpipe.text.chat.template import ChatTemplate

LIMITS = Limits(cpu_s=3, memory_bytes=1 << 30)
"""What a process that renders may use."""
_MOST_TEMPLATES = 4  # compiled ones; a model may have one for tools beside the usual one


class TemplateProcess:
    """Renders conversations. The process starts with the first one. Belongs to one thread."""

    def __init__(self, bos: str = "", eos: str = "", specials: Sequence[str] = ()) -> None:
        """`bos`, `eos`, `specials`: as for `ChatTemplate`."""
        self._names = (bos, eos, list(specials))
        self._literals = Literals(specials)
        self._process: LimitedProcess | None = None

    def conversation(
        self,
        source: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        asks: bool,
        further: Mapping[str, Any],
    ) -> tuple[str, str]:
        """What `ChatTemplate.conversation` returns for the template `source`. Raises what it raises, UsageError if a
        limit is exceeded, and OSError if the process cannot be started."""
        if source == CHATML:  # ours
            return self._chatml.conversation([*map(dict, messages)], [*map(dict, tools)], asks, **further)
        try:
            question = json.dumps([source, *map(plain_json, (messages, tools)), asks, plain_json(further)])
        except RecursionError:
            raise UsageError("the conversation has values within values that are too deep") from None
        answer = json.loads(self._ask(question.encode()))
        match answer:
            case {"text": str() as text, "begun": str() as begun}:
                return text, begun
            case {"field": field, "problem": problem, "advice": advice}:
                raise SettingError(field, problem, advice)
        raise UsageError(answer["error"])

    def in_words(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        """The conversation for a template that knows only roles and text: tools and calls are text, in which special
        tokens are marked for `pieces`."""
        found = for_template([*map(dict, messages)], tools, "", arguments_as_text=False)
        return [self._literals.mark_message(message) for message in found]

    def pieces(self, rendered: str) -> Sequence[tuple[str, bool]]:
        """Split a conversation's text, as `ChatTemplate.pieces` does."""
        return self._literals.pieces(rendered)

    def close(self) -> None:
        """End the process. A second call does nothing."""
        if self._process is not None:
            self._process.end()
            self._process = None

    @functools.cached_property
    def _chatml(self) -> ChatTemplate:
        from ggpipe.text.chat.template import ChatTemplate  # Jinja is slow to import, and most ranks render nothing

        return ChatTemplate(CHATML, *self._names)

    def _ask(self, question: bytes) -> bytes:
        if self._process is None:
            self._process = LimitedProcess("ggpipe.text.chat.template_process", LIMITS)
            self._process.ask(json.dumps(self._names).encode())
        answer = self._process.ask(question)
        if answer is None:
            process, self._process = self._process, None
            limit = {
                Exceeded.TIME: f"takes more than {LIMITS.cpu_s} s",
                Exceeded.MEMORY: f"takes more than {LIMITS.memory_bytes >> 30} GiB of memory",
            }[process.end()]
            raise UsageError(f"the model's chat template {limit} for this conversation")
        return answer


def check_template(source: str) -> None:
    """Check, without a model, that Jinja can read a template. Raises SettingError."""
    process = TemplateProcess()
    try:
        process.conversation(source, [{"role": "user", "content": "Hello"}], [], True, {})
    except SettingError:
        raise
    except UsageError:
        pass  # it does not take this conversation, but may take others
    finally:
        process.close()


class _Answers:
    """The process's side."""

    def __init__(self) -> None:
        self._names: tuple[str, str, list[str]] | None = None
        self._compiled = functools.lru_cache(_MOST_TEMPLATES)(self._compile)

    def answer(self, question: bytes) -> bytes:
        """The answer to a question; the first one has the names of the model's tokens."""
        asked = json.loads(question)
        if self._names is None:
            self._names = asked
            return b"null"
        source, messages, tools, asks, further = asked
        try:
            text, begun = self._compiled(source).conversation(messages, tools, asks, **further)
            found = {"text": text, "begun": begun}
        except SettingError as e:
            found = {"field": e.field, "problem": str(e.problem), "advice": str(e.advice)}
        except UsageError as e:
            found = {"error": str(e)}
        return json.dumps(found).encode()

    def _compile(self, source: str) -> ChatTemplate:
        from ggpipe.text.chat.template import ChatTemplate

        assert self._names is not None
        return ChatTemplate(source, *self._names)


if __name__ == "__main__":
    answer_questions(_Answers().answer, LIMITS)

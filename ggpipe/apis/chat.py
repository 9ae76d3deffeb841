"""OpenAI's `/v1/chat/completions`: the body, which becomes a conversation, and the choices of the reply."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from ggpipe.apis.bodies import GenerationBody, text_of
from ggpipe.apis.replies import ChoiceWriter, chat_logprobs
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Token
from ggpipe.errors import BodyError
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.tools.choice import tool_choice
from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, Reasoning, Text

CHAT = "/v1/chat/completions"


class ChatBody(GenerationBody, kw_only=True):
    """Body of `/v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    """OpenAI's form of `tools` until 2023."""
    function_call: Any = None
    """OpenAI's form of `tool_choice` until 2023."""
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    """How much the model should reason. Ignored by templates that lack it."""
    add_generation_prompt: bool | None = None
    """Ask for the model's message after the others; None: yes."""
    continue_final_message: bool | None = None
    """Continue the last message, which is the model's; so it is anyway, unless `add_generation_prompt` is false."""

    def __post_init__(self) -> None:
        if self.continue_final_message and self.add_generation_prompt:
            raise BodyError(
                "`add_generation_prompt` and `continue_final_message` cannot both be true: leave one of them out",
                "continue_final_message",
            )

    @property
    def prompts(self) -> Sequence[Conversation]:
        if not self.messages:
            raise BodyError("`messages` is empty: give at least one message", "messages")
        last = len(self.messages) - 1
        messages = tuple(_message(message, f"messages[{i}]", i == last) for i, message in enumerate(self.messages))
        further = dict(self.chat_template_kwargs or {})
        if self.reasoning_effort == "none":
            further.setdefault("enable_thinking", False)
        elif self.reasoning_effort:
            further.setdefault("reasoning_effort", self.reasoning_effort)
        functions = [{"type": "function", "function": function} for function in self.functions or ()]
        wanted = self.tool_choice if self.function_call is None else self.function_call
        if isinstance(wanted, dict) and "name" in wanted:
            wanted = {"type": "function", "function": wanted}
        tools, choice = tool_choice(self.tools or functions, wanted, self.parallel_tool_calls)
        return [
            Conversation(
                messages=messages, tools=tools, choice=choice, further=further,
                add_generation_prompt=self.add_generation_prompt is not False or bool(self.continue_final_message),
            )
        ]  # fmt: skip


def _message(message: dict[str, Any], at: str, is_last: bool) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BodyError(f"`{at}.role` must be a string, such as user or system", f"{at}.role")
    if content is not None:
        # As in llama-server, a message to be continued has an empty line between its parts.
        separator = "\n\n" if is_last and role == "assistant" else "\n"
        content = text_of(content, f"{at}.content", ("text", "input_text"), separator=separator)
    elif role != "assistant":
        raise BodyError(f"`{at}.content` is missing", f"{at}.content")
    return {**message, "role": "system" if role == "developer" else role, "content": content or ""}


class ChatWriter(ChoiceWriter):
    """The reply to `/v1/chat/completions`."""

    prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"
    empty: ClassVar[dict[str, Any]] = {"delta": {}}
    first: ClassVar[dict[str, Any] | None] = {"delta": {"role": "assistant", "content": None}}

    def _part(self, one: AnswerEvent) -> dict[str, Any] | None:
        match one:
            case Text(text):
                return {"delta": {"content": text}}
            case Reasoning(text):
                return {"delta": {"reasoning_content": text}}
            case CallBegun(call, identity, name):
                function = {"name": name, "arguments": ""}
                return _call_delta({"index": call, "id": identity, "type": "function", "function": function})
            case Arguments(call, text):
                return _call_delta({"index": call, "function": {"arguments": text}})
        return None

    def _logprobs(self, index: int, tokens: Sequence[Token]) -> dict[str, Any] | None:
        return chat_logprobs(tokens, self._body.n_best_probs)

    def _content(self, answer: WholeAnswer) -> dict[str, Any]:
        return {"message": answer.message}


def _call_delta(call: dict[str, Any]) -> dict[str, Any]:
    return {"delta": {"tool_calls": [call]}}

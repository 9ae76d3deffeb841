"""Chat templates, which turn a conversation into the format that a model was trained on.

Templates are Jinja programs from model files, which are not trusted: they run in jinja2's sandbox. They are written for
transformers, so they get the names that it defines.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import SandboxedEnvironment
from jinja2.utils import Namespace

from ggpipe.errors import SettingError, UsageError
from ggpipe.text.chat.literals import Literals, plain_json
from ggpipe.text.chat.template_support import TemplateSupport
from ggpipe.text.chat.tools.messages import for_template, tool_for_template

_OWN_NAMES = ("messages", "tools", "add_generation_prompt")


class ChatTemplate:
    """A compiled chat template. Thread-safe."""

    def __init__(
        self,
        source: str,
        bos: str = "",
        eos: str = "",
        specials: Sequence[str] = (),
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        """`bos`, `eos`: names of these tokens. `specials`: names of the tokens that only the template may write. `now`:
        the clock of templates that write the date.

        Raises SettingError if Jinja cannot parse the template.
        """
        self.source = source
        self._now = now
        self._known = {"bos_token": bos, "eos_token": eos}
        self._literals = Literals(specials)
        self._support = TemplateSupport(source, self.render, self._usual())
        try:
            environment = _environment()
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(
                source, globals={"strftime_now": lambda pattern: now().strftime(pattern)}
            )
        except jinja2.TemplateError as e:
            raise SettingError("chat_template", f"is no template that Jinja can read: {e}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **further: object,
    ) -> str:
        """Render a conversation.

        `messages`, `tools`: in the format of OpenAI's API. What looks like a special token in them is marked, see
        `literals`. `further`: variables for the template, such as `enable_thinking`.

        Raises UsageError if the template rejects the conversation or fails.
        """
        plain = [self._literals.mark_message(plain_json(message)) for message in messages]
        names = {**self._known, "messages": plain, "add_generation_prompt": add_generation_prompt, **further}
        try:
            if tools:
                names["tools"] = self._literals.mark(plain_json(tools))
            if "functions" in self._variables and "tools" not in self._variables:
                names.setdefault("functions", _to_json(names["tools"], indent=4) if tools else "")
            return self._template.render(names)
        except Exception as e:  # a template may raise anything, and must not end the head
            raise UsageError(f"the model's chat template does not take this conversation: {e}") from e

    def conversation(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        asks: bool = True,
        /,
        **further: object,
    ) -> tuple[str, str]:
        """Render a conversation as llama-server does: with tools and calls in the form that this template expects, a
        system message that it can take, the date, and `enable_thinking`, unless `further` says otherwise.

        `asks`: the text ends with what prompts the model to answer. Returns the text, and that end. Raises SettingError
        if `further` has a name that is set here, and UsageError as `render` does.
        """
        if name := next((name for name in _OWN_NAMES if name in further), None):
            raise SettingError(
                "chat_template_kwargs", f"has {name}, which follows from the conversation", "leave it out"
            )
        names = {**self._usual(), "enable_thinking": self._support.thinks, **further}
        given = [*map(tool_for_template, tools)]
        for arguments_as_text in (False, True):
            written = self._support.adapted(for_template(messages, tools, self.source, arguments_as_text))
            try:
                text = self.render(written, given, add_generation_prompt=asks, **names)
            except UsageError:
                if arguments_as_text or not any(message.get("tool_calls") for message in messages):
                    raise
            else:
                break
        return text, self.generation_prompt(text, written, given, **names) if asks else ""

    def _usual(self) -> dict[str, object]:
        """Variables that llama-server gives to templates."""
        now = self._now()
        return {"date_string": now.strftime("%d %b %Y"), "datetime": now.strftime("%b %d %Y")}

    def generation_prompt(
        self,
        rendered: str,
        messages: Sequence[Mapping[str, Any]],
        /,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **further: object,
    ) -> str:
        """The end of `rendered`, which prompts the model to answer; all of it where that cannot be determined."""
        try:
            without = self.render(messages, tools, add_generation_prompt=False, **further)
        except UsageError:
            without = ""
        return rendered.removeprefix(without) or rendered

    def pieces(self, rendered: str) -> Sequence[tuple[str, bool]]:
        """Split the output of `render`, as `Literals.pieces` does."""
        return self._literals.pieces(rendered)


def _environment() -> SandboxedEnvironment:
    environment = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= dict.fromkeys(("safe", "e", "escape"), str) | {"tojson": _to_json}  # prompts are not HTML
    environment.globals |= {
        "raise_exception": _raise,
        "namespace": _PublicNamespace,
        "dict": lambda *pairs, **named: dict(*pairs, **named),
    }
    return environment


class _Generation(Extension):
    """`{% generation %}`, which marks the model's own output for training. Here it is a block without a meaning."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        block = Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))
        block.set_lineno(line)
        return block


class _PublicNamespace(Namespace):
    """Rejects names with a leading underscore, through which a template could reach Python's own objects."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _raise(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter would escape quotes and angle brackets for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_jsonable
    )


def _jsonable(value: object) -> object:
    """What Jinja has beside the types of JSON."""
    if isinstance(value, jinja2.Undefined):
        return None
    if isinstance(value, Iterator):  # a filter's output
        return [*value]
    raise TypeError(f"{type(value).__name__} is not JSON")

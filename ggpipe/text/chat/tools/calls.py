"""Tool calls that a parser has read, as events."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ggpipe.text.chat.tools.events import AnswerEvent, Arguments, CallBegun, CallEnded
from ggpipe.text.chat.tools.forms import Form, call_id

_NAME = re.compile(r"[\w.:/-]{1,256}")


class NotACall(Exception):
    """The text is not a call, or it is malformed."""


class Calls:
    """Collects the calls that `reading` finds, as events."""

    def __init__(self, form: Form, tools: Sequence[Mapping[str, Any]], key: str, is_marked: bool) -> None:
        """`tools`, `key`: as for `ToolParser`. `is_marked`: calls begin with a mark, so that even the call of an
        unknown tool is a call."""
        self.form = form
        self._key, self._is_marked = key, is_marked
        self._tools = {tool["function"]["name"]: tool["function"] for tool in tools}
        self._events: list[AnswerEvent] = []
        self._ids: set[str] = set()
        self._n_begun = 0
        self._has_ended = False
        self.is_open = False
        """Whether a call has started and has not ended."""

    def check(self, name: str) -> None:
        """Raises NotACall unless a tool of this name may be called."""
        if name not in self._tools and not (self._is_marked and _NAME.fullmatch(name)):
            raise NotACall

    def begin(self, name: str, identity: str | None = None) -> None:
        """Begin a call, whose arguments follow. `identity`: the id that the model wrote; None: it wrote none. Raises
        NotACall as `check` does."""
        self.check(name)
        if identity is None or identity in self._ids:
            identity = call_id(self.form, self._key, self._n_begun)
        self._ids.add(identity)
        self._events.append(CallBegun(self._n_begun, identity, name))
        self._n_begun += 1
        self.is_open = True

    def write(self, text: str) -> None:
        """Add to the arguments of the current call."""
        self._events.append(Arguments(self._n_begun - 1, text))

    def end(self) -> None:
        """End the current call."""
        self._events.append(CallEnded(self._n_begun - 1))
        self.is_open, self._has_ended = False, True

    def ends(self) -> bool:
        """Whether a call has ended since this was last asked."""
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def without_arguments(self) -> str:
        """The arguments of a call that has none. Raises NotACall where a call must have some."""
        if not self._is_marked:
            raise NotACall  # an ordinary JSON object with a name in it
        return "{}"

    def properties(self, name: str) -> Mapping[str, Any]:
        """The JSON schemas of a tool's parameters, by name."""
        found = (self._tools.get(name, {}).get("parameters") or {}).get("properties")
        return found if isinstance(found, Mapping) else {}

    def take(self) -> list[AnswerEvent]:
        """The events since this was last called."""
        events, self._events = self._events, []
        return events

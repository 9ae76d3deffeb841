"""The format in which a model was trained to call tools, recognized by its chat template."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


class Form(enum.Enum):
    """A family of models that call tools in the same format."""

    HERMES = "hermes"
    """Hermes, Qwen 2.5, Qwen 3 and many others."""
    QWEN_XML = "qwen-xml"
    """Qwen3-Coder, Nemotron 3: a tag for each argument."""
    MISTRAL = "mistral"
    """Mistral 7B v0.3, Nemo, Small 3.1: a list of calls."""
    MISTRAL_ARGS = "mistral-args"
    """Magistral, Devstral, Mistral Small 3.2: a mark before each call."""
    GRANITE = "granite"
    LLAMA = "llama"
    """Llama 3.1 and later: the whole answer is a call."""
    JSON = "json"
    """Models that were not trained to call tools. A system message tells them how (`messages`)."""


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How a family writes calls: the mark and `begin`; for each call `before`, its arguments in JSON and `after`, with
    `between` between two calls; then `end`. NAME stands for the tool's name."""

    mark: str = ""
    """Empty: a call has no mark, and begins where the answer begins."""
    further_marks: tuple[str, ...] = ()
    """Alternatives to `mark`."""
    starts: tuple[str, ...] = ()
    """What a call without a mark may begin with."""
    has_each_mark: bool = False
    """The mark is repeated before each call."""
    begin: str = ""
    before: str
    after: str
    between: str | None = None
    """None: the model makes only one call."""
    end: str = ""
    closers: tuple[str, ...] = ()
    """What may follow a call without being text."""
    id_length: int = 0
    """Letters and digits in a call's id, as the template requires; 0: any number."""


_OBJECT = '{"name": "NAME", "arguments": '
CALL_SYNTAXES: Mapping[Form, CallSyntax] = {
    Form.HERMES: CallSyntax(
        mark="<tool_call>", has_each_mark=True, before=f"\n{_OBJECT}", after="}\n</tool_call>", between="\n",
        closers=("</tool_call>",),
    ),
    Form.QWEN_XML: CallSyntax(
        mark="<tool_call>", starts=("<function=",), has_each_mark=True, before="\n<function=NAME>\n",
        after="</function>\n</tool_call>", between="\n", closers=("</tool_call>",),
    ),
    Form.MISTRAL: CallSyntax(
        mark="[TOOL_CALLS]", begin="[", before=_OBJECT, after="}", between=", ", end="]", id_length=9
    ),
    Form.MISTRAL_ARGS: CallSyntax(
        mark="[TOOL_CALLS]", has_each_mark=True, before="NAME[ARGS]", after="", between="", id_length=9
    ),
    Form.GRANITE: CallSyntax(mark="<|tool_call|>", begin="[", before=_OBJECT, after="}", between=", ", end="]"),
    Form.LLAMA: CallSyntax(
        further_marks=("<|python_tag|>",), before='{"name": "NAME", "parameters": ', after="}", closers=(";",)
    ),
    Form.JSON: CallSyntax(before=_OBJECT, after="}", between="\n", closers=(",",)),
}  # fmt: skip


def form_of(template: str) -> Form:
    """The format in which a model was trained to call tools. `template`: source of its chat template."""
    if "[TOOL_CALLS]" in template:
        return Form.MISTRAL_ARGS if "[ARGS]" in template else Form.MISTRAL
    if "<tool_call>" in template and "<arg_key>" not in template:
        return Form.QWEN_XML if "<function=" in template else Form.HERMES
    if "<|tool_call|>" in template:
        return Form.GRANITE
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Form.LLAMA
    return Form.JSON


def call_id(form: Form, key: str, index: int) -> str:
    """The id of a call. `key`: unique to the answer."""
    digits = hashlib.sha256(f"{key}/{index}".encode()).hexdigest()
    length = CALL_SYNTAXES[form].id_length
    return digits[:length] if length else f"call_{digits[:24]}"

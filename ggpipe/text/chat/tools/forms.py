"""In which form a model was trained to call tools, told from its chat template."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass


class Form(enum.Enum):
    """A family of models, by how they call tools."""

    HERMES = "hermes"
    """Hermes, Qwen 2.5, Qwen 3 and many others."""
    QWEN_XML = "qwen-xml"
    """Qwen3-Coder, Nemotron 3: a tag for each argument."""
    MISTRAL = "mistral"
    """Mistral 7B v0.3, Nemo, Small 3.1: a list."""
    MISTRAL_ARGS = "mistral-args"
    """Magistral, Devstral, Mistral Small 3.2: each call has a mark."""
    GRANITE = "granite"
    LLAMA = "llama"
    """Llama 3.1 and later: the whole answer is a call."""
    JSON = "json"
    """Models that were not trained for it: they are told what to write (`messages`)."""


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How calls are written: the mark, `begin`, then for each call `before`, its arguments in JSON and `after`, with
    `between` between two of them, then `end`. NAME stands for the tool's name."""

    mark: str = ""
    """Nothing: calls are told by standing where the answer begins."""
    further_marks: tuple[str, ...] = ()
    """That may stand in its place."""
    starts: tuple[str, ...] = ()
    """That a call may begin with where there is no mark."""
    has_each_mark: bool = False
    """Each call has a mark of its own."""
    begin: str = ""
    before: str
    after: str
    between: str | None = None
    """None: there is one call only."""
    end: str = ""
    closers: tuple[str, ...] = ()
    """What may follow a call, and is no text."""
    id_length: int = 0
    """The template wants ids of so many letters and digits; 0: any."""


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
    """The form that a model was trained with. `template`: its source."""
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
    """The id of a call. `key`: of its answer, and of no other one."""
    digits = hashlib.sha256(f"{key}/{index}".encode()).hexdigest()
    length = CALL_SYNTAXES[form].id_length
    return digits[:length] if length else f"call_{digits[:24]}"

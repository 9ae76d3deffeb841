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
    GLM = "glm"
    """GLM-4.5, 4.6, 5: a key and a value for each argument."""
    GLM_INLINE = "glm-inline"
    """GLM-4.7: the same on one line."""
    KIMI = "kimi"
    """Kimi K2: special tokens around ids and arguments."""
    DEEPSEEK = "deepseek"
    """DeepSeek V3.1: special tokens around names and arguments."""
    DEEPSEEK_BLOCK = "deepseek-block"
    """DeepSeek V3, R1: the arguments are a code block."""
    DSML = "dsml"
    """DeepSeek V3.2: a tag for each argument."""
    DSML_4 = "dsml-4"
    """DeepSeek V4: the same, in a block with another name."""
    MINIMAX = "minimax"
    """MiniMax M2: a tag for each argument."""
    HARMONY = "harmony"
    """gpt-oss: a message to the tool."""
    GRANITE = "granite"
    LLAMA = "llama"
    """Llama 3.1 and later: the whole answer is a call."""
    JSON = "json"
    """Models that were not trained to call tools. A system message tells them how (`messages`)."""


@dataclass(frozen=True, kw_only=True)
class Tags:
    """How a family writes an argument: `before`, the value, `after`. KEY stands for the parameter's name, and STRING
    for whether it is a string: true or false."""

    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class CallSyntax:
    """How a family writes calls: the mark and `begin`; for each call `before`, its arguments and `after`, with
    `between` between two calls; then `end`. NAME stands for the tool's name, and INDEX for any number."""

    mark: str = ""
    """Empty: a call has no mark, and begins where the answer begins."""
    further_marks: tuple[str, ...] = ()
    """Alternatives to `mark`."""
    starts: tuple[str, ...] = ()
    """What a call without a mark may begin with."""
    has_each_mark: bool = False
    """The mark is repeated before each call."""
    lead: str = ""
    """What may come before the mark without being text."""
    begin: str = ""
    before: str
    after: str
    between: str | None = None
    """None: the model makes only one call."""
    end: str = ""
    closers: tuple[str, ...] = ()
    """What may follow a call without being text."""
    tags: Tags | None = None
    """None: the arguments are in JSON."""
    id_length: int = 0
    """Letters and digits in a call's id, as the template requires; 0: any number."""


def _dsml(block: str) -> CallSyntax:
    return CallSyntax(
        mark=f"<｜DSML｜{block}>", end=f"\n</｜DSML｜{block}>", between="",
        before='\n<｜DSML｜invoke name="NAME">', after="\n</｜DSML｜invoke>",
        tags=Tags(before='\n<｜DSML｜parameter name="KEY" string="STRING">', after="</｜DSML｜parameter>"),
    )  # fmt: skip


_OBJECT = '{"name": "NAME", "arguments": '
CALL_SYNTAXES: Mapping[Form, CallSyntax] = {
    Form.HERMES: CallSyntax(
        mark="<tool_call>", has_each_mark=True, before=f"\n{_OBJECT}", after="}\n</tool_call>", between="\n",
        closers=("</tool_call>",),
    ),
    Form.QWEN_XML: CallSyntax(
        mark="<tool_call>", starts=("<function=",), has_each_mark=True, before="\n<function=NAME>\n",
        after="</function>\n</tool_call>", between="\n", closers=("</tool_call>",),
        tags=Tags(before="<parameter=KEY>\n", after="\n</parameter>\n"),
    ),
    Form.MISTRAL: CallSyntax(
        mark="[TOOL_CALLS]", begin="[", before=_OBJECT, after="}", between=", ", end="]", id_length=9
    ),
    Form.MISTRAL_ARGS: CallSyntax(
        mark="[TOOL_CALLS]", has_each_mark=True, before="NAME[ARGS]", after="", between="", id_length=9
    ),
    Form.GLM: CallSyntax(
        mark="<tool_call>", has_each_mark=True, before="NAME", after="\n</tool_call>", between="\n",
        tags=Tags(before="\n<arg_key>KEY</arg_key>\n<arg_value>", after="</arg_value>"),
    ),
    Form.GLM_INLINE: CallSyntax(
        mark="<tool_call>", has_each_mark=True, before="NAME", after="</tool_call>", between="",
        tags=Tags(before="<arg_key>KEY</arg_key><arg_value>", after="</arg_value>"),
    ),
    Form.KIMI: CallSyntax(
        mark="<|tool_calls_section_begin|>", end="<|tool_calls_section_end|>", between="",
        before="<|tool_call_begin|>functions.NAME:INDEX<|tool_call_argument_begin|>", after="<|tool_call_end|>",
    ),
    Form.DEEPSEEK: CallSyntax(
        mark="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", between="",
        before="<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", after="<｜tool▁call▁end｜>",
    ),
    Form.DEEPSEEK_BLOCK: CallSyntax(
        mark="<｜tool▁calls▁begin｜>", end="<｜tool▁calls▁end｜>", between="\n",
        before="<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", after="\n```<｜tool▁call▁end｜>",
    ),
    Form.DSML: _dsml("function_calls"),
    Form.DSML_4: _dsml("tool_calls"),
    Form.MINIMAX: CallSyntax(
        mark="<minimax:tool_call>", end="\n</minimax:tool_call>", between="",
        before='\n<invoke name="NAME">', after="\n</invoke>",
        tags=Tags(before='\n<parameter name="KEY">', after="</parameter>"),
    ),
    Form.HARMONY: CallSyntax(
        mark="<|channel|>commentary to=functions.", lead="<|start|>assistant",
        further_marks=(
            "<|start|>assistant<|channel|>commentary to=functions.", "<|start|>assistant to=functions.",
            "<|end|><|start|>assistant<|channel|>commentary to=functions.", "<|end|><|start|>assistant to=functions.",
            "<|channel|>analysis to=functions.", "<|start|>assistant<|channel|>analysis to=functions.",
        ),
        before="NAME <|constrain|>json<|message|>", after="", closers=("<|call|>",),
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
    if "DSML" in template:
        return Form.DSML if "function_calls" in template else Form.DSML_4
    if "<｜tool▁calls▁begin｜>" in template:
        return Form.DEEPSEEK_BLOCK if "```json" in template else Form.DEEPSEEK
    if "<|tool_calls_section_begin|>" in template:
        return Form.KIMI
    if "<minimax:tool_call>" in template:
        return Form.MINIMAX
    if "<|channel|>" in template and "functions." in template:
        return Form.HARMONY
    if "<tool_call>" in template and "<arg_key>" in template:
        return Form.GLM_INLINE if "</arg_key><arg_value>" in template else Form.GLM
    if "<tool_call>" in template:
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

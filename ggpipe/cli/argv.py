"""Command lines as llama.cpp's and PipeInfer's users write them, made fit for typer."""

from __future__ import annotations

from collections.abc import Sequence

_BARE = {  # options that may stand without a value: the value that this means, and those it can take
    "--numa": ("distribute", ("distribute", "isolate", "numactl")),
    "--flash-attn": ("on", ("on", "off", "auto")),
    "-fa": ("on", ("on", "off", "auto")),
    "--color": ("on", ("on", "off", "auto")),
}

_SAME = {"--log-jsonl": "--log-format=json", "-co": "--color"}
"""Options of llama.cpp that have another name here."""

SWITCHES = {"1": "on", "true": "on", "enabled": "on", "0": "off", "false": "off", "disabled": "off"}
"""Further words for on and off that llama.cpp takes."""

_FREE_TEXT = (
    "-p",
    "--prompt",
    "-f",
    "--file",
    "-m",
    "--model",
    "-md",
    "--model-draft",
    "-r",
    "--reverse-prompt",
    "--dry-sequence-breaker",
)  # their values may look like options


def normalise(arguments: Sequence[str]) -> list[str]:
    """`--top_k` becomes `--top-k`; a bare `--numa`, `-fa` or `--color` gets its value."""
    out: list[str] = []
    is_value = False
    for i, argument in enumerate(arguments):
        follows_fa = not is_value and out[-1:] == ["on"] and arguments[i - 1] in ("-fa", "--flash-attn", "--flash_attn")
        if follows_fa and argument in SWITCHES:
            out[-1] = SWITCHES[argument]
            continue
        if is_value:
            out.append(argument)
            is_value = False
            continue
        argument = _SAME.get(argument, argument)
        if argument.startswith("--"):
            name, eq, value = argument.partition("=")
            argument = name.replace("_", "-") + eq + value
        out.append(argument)
        is_value = argument in _FREE_TEXT
        if argument in _BARE:
            meaning, values = _BARE[argument]
            if i + 1 == len(arguments) or arguments[i + 1] not in values:
                out.append(meaning)
    return out

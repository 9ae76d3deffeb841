"""Flags of llama.cpp that ggpipe does not have, and what to do instead.

Left to typer, `-ngl 99` would be `-n` with the value `gl`, and `-hf` would show the help.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ggpipe.errors import UsageError
from ggpipe.options.option import Option

_NEEDLESS = ("-no-cnv", "--no-conversation", "--jinja", "--no-context-shift", "--no-warmup")
"""What ggpipe does anyway: they are accepted."""

_REASONS = {
    "ggpipe runs on CPUs only: leave it out": (
        "-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
        "--spec-draft-ngl", "-dev", "--device", "-devd", "--device-draft", "-sm", "--split-mode", "-mg", "--main-gpu",
        "--list-devices", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "-cmoe", "--cpu-moe", "-ncmoe",
        "--n-cpu-moe", "-ot", "--override-tensor", "--op-offload", "--no-op-offload", "--no-host", "-fit", "--fit",
    ),
    "ggpipe starts ranks on other machines itself: use `shares` and `hostfile`": ("--rpc",),
    "ggpipe downloads nothing: name a file with `model`": (
        "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "-hfd", "--hf-repo-draft", "-mu",
        "--model-url", "-dr", "--docker-repo", "--offline", "-cl", "--cache-list",
    ),
    "`ggpipe chat` is a conversation without any flag, and `ggpipe generate -st` answers one question": (
        "-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "--multiline-input",
    ),
    "give the text itself, with `system`": ("-sysf", "--system-prompt-file"),
    "give the prompt as text, with `file`": ("-bf", "--binary-file"),
    "the chat template puts texts around messages, see --chat-template": ("--in-prefix", "--in-suffix", "-ptc"),
    "ggpipe shifts no contexts: raise `n_ctx`": ("--keep", "--context-shift"),
    "ggpipe reads texts only": ("-mm", "--mmproj", "--image", "--audio", "-mv"),
    "use -v, and 2>FILE for a file of it": ("-lv", "--verbosity", "--log-verbosity", "--log-file", "--log-disable"),
    "where stderr is no terminal, or with TERM=dumb, ggpipe writes plain text": ("--simple-io",),
    "start ggpipe with taskset, nice or chrt instead": (
        "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll", "-Cb", "-Crb",
    ),
}  # fmt: skip


def without_foreign(rows: Iterable[Option], arguments: Sequence[str]) -> list[str]:
    """The arguments of a command that has these options, without flags that mean nothing here.

    Raises UsageError for other flags of llama.cpp, and for a single dash before a word that is no option.
    """
    takes_value = {flag: row.reads is not bool for row in rows for text in row.flags for flag in re.split("[ /]", text)}
    reasons = {flag: reason for reason, flags in _REASONS.items() for flag in flags}
    out: list[str] = []
    is_value = False
    for i, argument in enumerate(arguments):
        if argument == "--":
            return [*out, *arguments[i:]]
        flag = argument.partition("=")[0]
        if is_value or flag in takes_value or argument in ("-h", "--help"):
            is_value = not is_value and takes_value.get(argument, False)
        elif flag in _NEEDLESS:
            continue
        elif flag in reasons:
            raise UsageError(f"{flag}: {reasons[flag]}")
        elif re.fullmatch("-[A-Za-z][A-Za-z-]+", flag):
            raise UsageError(f"No such option: {flag}")
        out.append(argument)
    return out

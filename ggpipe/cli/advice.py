"""Errors for command lines that cannot be parsed, with advice on what to change."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ggpipe.errors import Setting, UsageError, Wording
from ggpipe.options.option import Command, Option

NEEDLESS = {
    "-no-cnv": 0, "--no-conversation": 0, "--jinja": 0, "--no-context-shift": 0, "--no-warmup": 0, "--embedding": 0,
    "--embeddings": 0, "--threads-http": 1, "-cb": 0, "--cont-batching": 0, "-nocb": 0, "--no-cont-batching": 0,
    "-kvu": 0, "--kv-unified": 0, "-no-kvu": 0, "--no-kv-unified": 0, "-cram": 1, "--cache-ram": 1, "--cache-reuse": 1,
    "--cache-idle-slots": 0, "--no-cache-idle-slots": 0, "--swa-full": 0, "-ctxcp": 1, "--ctx-checkpoints": 1,
    "--swa-checkpoints": 1, "-sps": 1, "--slot-prompt-similarity": 1, "--props": 0, "--log-prefix": 0,
    "--no-log-prefix": 0, "--log-timestamps": 0, "--no-log-timestamps": 0, "--log-colors": 1, "--perf": 0,
    "--no-perf": 0, "--repack": 0, "-nr": 0, "--no-repack": 0, "--no-mmproj": 0, "--no-mmproj-auto": 0,
    "--mmproj-auto": 0, "--prefill-assistant": 0, "--no-skip-chat-parsing": 0, "--prio-batch": 1, "--reuse-port": 0,
    "--models-autoload": 0, "--no-models-autoload": 0, "-bs": 0, "--backend-sampling": 0, "--backend_sampling": 0,
}  # fmt: skip
"""llama.cpp's flags that change nothing here, with the number of their values. They are accepted."""

ALONE = ("--version", "--install-completion", "--man")
"""Flags that come without a command."""

_LAYER_SPLIT = Setting("layer_split")
REASONS: Mapping[str | Wording, tuple[str, ...]] = {
    "ggpipe runs on CPUs only: omit this flag": (
        "-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
        "--spec-draft-ngl", "-dev", "--device", "-devd", "--device-draft", "-sm", "--split-mode", "-mg", "--main-gpu",
        "--list-devices", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "-cmoe", "--cpu-moe", "-ncmoe",
        "--n-cpu-moe", "-ot", "--override-tensor", "--op-offload", "--no-op-offload", "--no-host", "-fit", "--fit",
    ),
    Wording("ggpipe starts ranks on other machines: use ", _LAYER_SPLIT, " and ", Setting("hostfile")): ("--rpc",),
    Wording("name a model on the Hugging Face Hub with ", Setting("hf_repo"), ", or a file with ", Setting("model")): (
        "-mu", "--model-url", "-dr", "--docker-repo", "-hfv", "-hfrv", "--hf-repo-v", "-hffv", "--hf-file-v",
    ),
    "use the Hugging Face Hub's tool: `hf cache ls`": ("-cl", "--cache-list"),
    "omit this flag: `ggpipe chat` starts a conversation, and `ggpipe generate -st` answers one question": (
        "-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "--multiline-input",
    ),
    Wording("pass the system prompt itself, with ", Setting("system")): ("-sysf", "--system-prompt-file"),
    Wording("ggpipe does not read binary prompts: use a text file, with ", Setting("file")): ("-bf", "--binary-file"),
    "the chat template formats the messages, see --chat-template": ("--in-prefix", "--in-suffix", "-ptc"),
    Wording("ggpipe does not shift contexts: raise ", Setting("n_ctx")): ("--keep", "--context-shift"),
    "ggpipe does not support images or audio": ("-mm", "--mmproj", "--image", "--audio", "-mv"),
    "use -v, and 2>FILE to write the log to a file": (
        "-lv", "--verbosity", "--log-verbosity", "--log-file", "--log-disable",
    ),
    "omit this flag: ggpipe writes plain text if stderr is not a terminal, or if TERM=dumb": ("--simple-io",),
    "use taskset, nice or chrt to start ggpipe instead": (
        "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll", "-Cb", "-Crb",
    ),
    "ggpipe always reads chat templates as Jinja": ("--no-jinja",),
    "ggpipe returns no special tokens": ("-sp", "--special"),
    "pass it as a variable of the template: --chat-template-kwargs '{\"reasoning_effort\": \"high\"}'": (
        "--reasoning-effort",
    ),
    "ggpipe serves one model: start a process for each": (
        "--models-dir", "--models-max", "--models-preset", "--sleep-idle-seconds",
    ),
    "ggpipe does not support control vectors": (
        "--control-vector", "--control-vector-scaled", "--control-vector-layer-range",
    ),
    "ggpipe does not rank documents": ("--rerank", "--reranking"),
    Wording("ggpipe does not stretch contexts in this way: use ", Setting("rope_scaling")): (
        "-gan", "--grp-attn-n", "-gaw", "--grp-attn-w",
    ),
    "ggpipe runs no tools: clients run those that the model calls": (
        "--tools", "--tools-runtime", "--mcp-servers-config", "--mcp-servers-json", "--ui-mcp-proxy",
    ),
    "answers always begin where a last message of the assistant ends": ("--no-prefill-assistant",),
}  # fmt: skip
"""Why ggpipe lacks some of llama.cpp's flags, and what to do instead."""


@dataclass(frozen=True)
class Stray:
    """A word that does not belong to an option."""

    word: str
    after: Option | None
    """The option whose value comes before the word, if no flag is between them."""


def no_command(commands: Sequence[Command], arguments: Sequence[str]) -> UsageError:
    """The error for a command line that does not start with a command."""
    names, first = [command.name for command in commands if not command.hidden], arguments[0]
    known = f"the commands are {', '.join(names)}"
    if first in ("-v", "-V", "version"):
        return UsageError(f"no such command: {first}; write `ggpipe --version` for the version")
    if similar := difflib.get_close_matches(first, ALONE, 1):
        return UsageError(f"no such option: {first}; did you mean {similar[0]}?")
    if first.startswith("-") and (named := [name for name in names if name in arguments]):
        return UsageError(f"{first} is before the command: write `ggpipe {named[0]} {first} ...`")
    if first.startswith("-"):
        return UsageError(f"the first word must be a command, as in `ggpipe generate {first} ...`; {known}")
    similar = difflib.get_close_matches(first, names, 1)
    return UsageError(f"no such command: {first}; " + (f"did you mean {similar[0]}?" if similar else known))


def check_foreign(flag: str, own: Collection[str]) -> int:
    """The number of values of a flag that changes nothing. Raises UsageError for other flags that are not the command's
    `own`."""
    if flag in NEEDLESS:
        return NEEDLESS[flag]
    reason = next((reason for reason, flags in REASONS.items() if flag in flags), None)
    if reason is not None:
        raise UsageError(f"{flag}: ", reason)
    similar = difflib.get_close_matches(flag, [name for name in own if name.startswith("--")], 3)
    hint = f"; did you mean {' or '.join(similar)}?" if similar and flag.startswith("--") else ""
    raise UsageError(f"no such option: {flag}{hint}")


def missing(row: Option) -> UsageError:
    """The error for a required option that was not given."""
    return UsageError(f"{row.spelling} is missing: {row.help}")


def stray(found: Stray, rows: Sequence[Option], given: Collection[str]) -> UsageError:
    """The error for a word that does not belong to an option. `rows`: the command's options. `given`: the names of
    those with a value."""
    word, names = found.word, {row.name for row in rows}
    if word.endswith(".gguf") and "model" in names and "model" not in given:
        return UsageError(f"unexpected argument {word}: name the model with ", Setting("model"), f", as in -m {word}")
    if found.after is not None and found.after.name in ("prompt", "system"):
        after = Setting(found.after.name)
        return UsageError(f"{word} is not part of ", after, ": put several words in quotes")
    if "prompt" in names and not {"prompt", "file"} & set(given):
        return UsageError(f"unexpected argument {word}: give the prompt with ", Setting("prompt"), ", in quotes")
    return UsageError(f"unexpected argument {word}: if it is part of a value, put the value in quotes")

"""What to change in a command line that cannot be read."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ggpipe.errors import Setting, UsageError, Wording
from ggpipe.options.option import Command, Option

NEEDLESS = ("-no-cnv", "--no-conversation", "--jinja", "--no-context-shift", "--no-warmup")
"""What ggpipe does anyway: they are accepted."""

_LAYER_SPLIT = Setting("layer_split")
REASONS: Mapping[str | Wording, tuple[str, ...]] = {
    "ggpipe runs on CPUs only: leave it out": (
        "-ngl", "--gpu-layers", "--n-gpu-layers", "-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft",
        "--spec-draft-ngl", "-dev", "--device", "-devd", "--device-draft", "-sm", "--split-mode", "-mg", "--main-gpu",
        "--list-devices", "-kvo", "--kv-offload", "-nkvo", "--no-kv-offload", "-cmoe", "--cpu-moe", "-ncmoe",
        "--n-cpu-moe", "-ot", "--override-tensor", "--op-offload", "--no-op-offload", "--no-host", "-fit", "--fit",
    ),
    Wording("ggpipe starts ranks on other machines: use ", _LAYER_SPLIT, " and ", Setting("hostfile")): ("--rpc",),
    Wording("ggpipe downloads nothing: name a file with ", Setting("model")): (
        "-hf", "-hfr", "--hf-repo", "-hff", "--hf-file", "-hft", "--hf-token", "-hfd", "--hf-repo-draft", "-mu",
        "--model-url", "-dr", "--docker-repo", "--offline", "-cl", "--cache-list",
    ),
    "`ggpipe chat` is a conversation without any flag, and `ggpipe generate -st` answers one question": (
        "-cnv", "--conversation", "-i", "--interactive", "-if", "--interactive-first", "-mli", "--multiline-input",
    ),
    Wording("give the text itself, with ", Setting("system")): ("-sysf", "--system-prompt-file"),
    Wording("give the prompt as text, with ", Setting("file")): ("-bf", "--binary-file"),
    "the chat template puts texts around messages, see --chat-template": ("--in-prefix", "--in-suffix", "-ptc"),
    Wording("ggpipe shifts no contexts: raise ", Setting("n_ctx")): ("--keep", "--context-shift"),
    "ggpipe reads texts only": ("-mm", "--mmproj", "--image", "--audio", "-mv"),
    "use -v, and 2>FILE for a file of it": ("-lv", "--verbosity", "--log-verbosity", "--log-file", "--log-disable"),
    "where stderr is no terminal, or with TERM=dumb, ggpipe writes plain text": ("--simple-io",),
    "start ggpipe with taskset, nice or chrt instead": (
        "-C", "--cpu-mask", "-Cr", "--cpu-range", "--cpu-strict", "--prio", "--poll", "-Cb", "-Crb",
    ),
}  # fmt: skip
"""Why ggpipe does not have flags of llama.cpp, and what to do instead."""


@dataclass(frozen=True)
class Stray:
    """A word that belongs to no option."""

    word: str
    after: Option | None
    """The option with whose value it follows, without another option between them."""


def no_command(commands: Sequence[Command], arguments: Sequence[str]) -> UsageError:
    """For a command line that begins with something else than a command."""
    names, first = [command.name for command in commands if not command.hidden], arguments[0]
    known = f"commands are {', '.join(names)}"
    if first.startswith("-") and (named := [name for name in names if name in arguments]):
        return UsageError(f"{first} comes before the command: write `ggpipe {named[0]} {first} ...`")
    if first.startswith("-"):
        return UsageError(f"{first} comes before a command, such as `ggpipe generate {first} ...`; {known}")
    similar = difflib.get_close_matches(first, names, 1)
    return UsageError(f"there is no command {first}: " + (f"did you mean {similar[0]}?" if similar else known))


def check_foreign(flag: str, own: Collection[str]) -> None:
    """Raises UsageError for a flag that is not one of the command's `own`, unless it is one of `NEEDLESS`."""
    if flag in NEEDLESS:
        return
    reason = next((reason for reason, flags in REASONS.items() if flag in flags), None)
    if reason is not None:
        raise UsageError(f"{flag}: ", reason)
    similar = difflib.get_close_matches(flag, [name for name in own if name.startswith("--")], 3)
    hint = f": did you mean {' or '.join(similar)}?" if similar and flag.startswith("--") else ""
    raise UsageError(f"no such option: {flag}{hint}")


def missing(row: Option) -> UsageError:
    """For an option that the command cannot do without."""
    return UsageError(f"{row.spelling} is missing: {row.help}")


def stray(found: Stray, rows: Sequence[Option], given: Collection[str]) -> UsageError:
    """For a word that belongs to none of the options `rows`. `given`: the names of those that have values."""
    word, names = found.word, {row.name for row in rows}
    if word.endswith(".gguf") and "model" in names and "model" not in given:
        return UsageError(f"{word} stands alone: name the model with ", Setting("model"), f", as in -m {word}")
    if found.after is not None and found.after.name in ("prompt", "system"):
        after = Setting(found.after.name)
        return UsageError(f"{word} follows the text of ", after, ": put a text of several words into quotes")
    if "prompt" in names and not {"prompt", "file"} & set(given):
        return UsageError(f"{word} stands alone: give a prompt with ", Setting("prompt"), ", in quotes")
    return UsageError(f"{word} stands alone: no option takes it; a text of several words needs quotes")

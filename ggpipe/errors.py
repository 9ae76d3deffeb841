"""Every error that ggpipe raises on purpose.

Messages name settings as the config records do: raise `n_ctx`. The name is data (`Setting`), so the command line can
show the flag instead.

GgpipeError                         exit code 1
├── UsageError                      exit code 2: wrong input; the message says what to change
│   ├── BodyError                   the body of a request
│   ├── PromptTooLong               a prompt that leaves no room for output
│   ├── SettingError                a setting that is out of bounds, or contradicts another one
│   ├── ModelError                  a model file that cannot be used
│   │   └── IndivisibleModelError   its layers cannot be split between ranks
│   ├── MemoryNeededError           a machine has less memory than its ranks need
│   └── LaunchError                 ranks, hosts or mpirun do not match the settings
│       ├── StartError              mpirun could not start the ranks
│       │   └── HostError           mpirun did not start on a machine, or lost it
│       └── MpiError                this rank cannot connect to the others
└── RunError                        the input was right, but something failed
    ├── Interrupted                 exit code 130: Ctrl-C before the first result
    ├── QueueFull                   too many requests are waiting
    ├── RankError                   another rank failed
    │   └── SilentRankError         another rank sends nothing: it is stopped, or cut off
    └── Terminated                  this process received SIGTERM, which mpirun sends if a rank is gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Setting:
    """The name of a setting in a message: a field of a config record, or `draft.threads` for those of DraftConfig."""

    name: str


@dataclass(frozen=True, init=False)
class Wording:
    """A message for the user. Its settings are data, so each front end can show the names that its users know."""

    parts: tuple[str | Setting, ...]

    def __init__(self, *parts: str | Setting | Wording | GgpipeError) -> None:
        """`parts`: to be joined. For errors, their messages."""
        object.__setattr__(self, "parts", tuple(_flat(parts)))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """The message as text. `spell`: returns what to write for a setting."""
        return "".join(spell(part.name) if isinstance(part, Setting) else part for part in self.parts)

    def renamed(self, names: Mapping[str, str]) -> Wording:
        """The message with other names for settings."""
        return Wording(*(Setting(names.get(p.name, p.name)) if isinstance(p, Setting) else p for p in self.parts))

    def __str__(self) -> str:
        return self.spelled("`{}`".format)


def _flat(parts: tuple[str | Setting | Wording | GgpipeError, ...]) -> Iterator[str | Setting]:
    for part in parts:
        own = part.wording if isinstance(part, GgpipeError) else part
        yield from own.parts if isinstance(own, Wording) else (own,)


class GgpipeError(Exception):
    """Base class. `str()` is one line for the user, with settings in backticks."""

    exit_code = 1
    is_reported = False
    """Whether the user has seen it."""

    def __init__(self, *parts: str | Setting | Wording | GgpipeError) -> None:
        """`parts`: the message, see `Wording`."""
        self.wording = Wording(*parts)  # `args` remain the arguments of the subclass, from which copies are made

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The error with other names for settings."""
        own = type(self).__new__(type(self), *self.args)
        own.__dict__.update(self.__dict__)
        own.wording = self.wording.renamed(names)
        own.__cause__ = self.__cause__
        return own

    def __str__(self) -> str:
        return str(self.wording)


class UsageError(GgpipeError):
    """Wrong input."""

    exit_code = 2


class SettingError(UsageError):
    """A setting that is out of bounds, or contradicts another one."""

    def __init__(self, field: str, problem: str | Wording, advice: str | Wording = "") -> None:
        """`field`: name of the `Setting`. `problem`: follows it in the message. `advice`: what to do."""
        super().__init__(Setting(field), " ", problem, *((": ", advice) if advice else ()))
        self.field = field
        self.problem = problem
        self.advice = advice

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The error with other names for settings."""
        own = super().renamed(names)
        own.field = names.get(self.field, self.field)
        return own


class BodyError(UsageError):
    """The body of a request, over HTTP or in a file of prompts. The message names its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the wrong field, such as `messages[0].content`."""
        super().__init__(message)
        self.param = param


class PromptTooLong(UsageError):
    """A prompt that leaves no room for output."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        """`n_prompt` and `n_ctx`: length of the prompt and of the context, in tokens."""
        super().__init__(
            f"the prompt has {n_prompt} tokens, but the context only {n_ctx}: raise ",
            Setting("n_ctx"),
            " above the prompt's length",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class ModelError(UsageError):
    """A model file that cannot be used: missing, damaged, unsupported, or different between machines."""


class IndivisibleModelError(ModelError):
    """A model whose layers cannot be split between ranks: they need more than the output of the previous layer."""


class MemoryNeededError(UsageError):
    """A machine has less memory available than its ranks need."""


class LaunchError(UsageError):
    """Ranks, hosts or mpirun do not match the settings."""


class StartError(LaunchError):
    """mpirun could not be started, ended, or took too long, before the first rank had connected to the front end."""


class HostError(StartError):
    """mpirun did not start on a machine, or lost it, before the first rank had connected to the front end."""

    def __init__(self, message: str, report: str = "") -> None:
        """`report`: lines that mpirun has printed."""
        super().__init__(message)
        self.report = report


class MpiError(LaunchError):
    """This rank cannot connect to the others, and cannot tell them of the error."""


class RunError(GgpipeError):
    """Something failed while running."""


class Interrupted(RunError):
    """The user stopped the command before the first result."""

    exit_code = 130


class QueueFull(RunError):
    """Too many requests are waiting. A later one may be accepted."""


class RankError(RunError):
    """Another rank failed."""


class SilentRankError(RankError):
    """Another rank sends nothing: its process is stopped, or its machine is cut off from the network."""


class Terminated(RunError):
    """This process received SIGTERM, which mpirun sends if a rank is gone."""

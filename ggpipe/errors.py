"""Every error that ggpipe raises on purpose.

A message names a setting as the config records do: raise `n_ctx`. The name is data (`Setting`), and the command line
shows the option's flag in its place.

GgpipeError                         exit code 1
├── UsageError                      exit code 2: wrong input; the message names what to change
│   ├── BodyError                   a request's body, as OpenAI's API has them
│   ├── PromptTooLong               a prompt that leaves no room for an answer
│   ├── SettingError                a setting that is out of bounds, or that contradicts another one
│   ├── ModelError                  a model file that cannot be used
│   │   └── IndivisibleModelError   its layers cannot be split between ranks
│   ├── MemoryNeededError           a machine has less memory than its ranks need
│   └── LaunchError                 ranks, hosts or mpirun do not fit the settings
│       ├── StartError              mpirun did not get the ranks to start
│       │   └── HostError           it did not start on one of the machines, or lost one
│       └── MpiError                this rank cannot connect to the others
└── RunError                        the input was right, but something broke
    ├── Interrupted                 exit code 130: Ctrl-C came before there was a result
    ├── QueueFull                   too many requests wait already
    ├── RankError                   another rank broke
    │   └── SilentRankError         another rank sends nothing any more: stopped, or cut off
    └── Terminated                  this process received SIGTERM, which mpirun sends when a rank is gone
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True)
class Setting:
    """The name of a setting within a message: a field of a config record; those of DraftConfig as `draft.threads`."""

    name: str

    def renamed(self, names: Mapping[str, str]) -> Setting:
        """Under the name that it has in `names`, if it has one there."""
        return Setting(names.get(self.name, self.name))


@dataclass(frozen=True, init=False)
class Wording:
    """A message for the user. Settings in it are data, so each front end writes them as its users know them."""

    parts: tuple[str | Setting, ...]

    def __init__(self, *parts: str | Setting | Wording | GgpipeError) -> None:
        """`parts`: one after the other; of an error, its message."""
        object.__setattr__(self, "parts", tuple(_flat(parts)))

    def spelled(self, spell: Callable[[str], str]) -> str:
        """As text. `spell` says how a setting is written."""
        return "".join(spell(part.name) if isinstance(part, Setting) else part for part in self.parts)

    def renamed(self, names: Mapping[str, str]) -> Wording:
        """The same with other names of settings."""
        return Wording(*(part.renamed(names) if isinstance(part, Setting) else part for part in self.parts))

    def __str__(self) -> str:
        return self.spelled("`{}`".format)


def _flat(parts: tuple[str | Setting | Wording | GgpipeError, ...]) -> Iterator[str | Setting]:
    for part in parts:
        own = part.wording if isinstance(part, GgpipeError) else part
        yield from own.parts if isinstance(own, Wording) else (own,)


class GgpipeError(Exception):
    """Base of all; `str()` is one line for the user, with settings in backticks."""

    exit_code = 1
    is_reported = False
    """It was shown to the user."""

    def __init__(self, *parts: str | Setting | Wording | GgpipeError) -> None:
        """`parts`: of the message, see `Wording`."""
        self.wording = Wording(*parts)  # `args` stay those of the class that is made: copies are made with them

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error with other names of settings."""
        own = type(self).__new__(type(self), *self.args)
        own.__dict__.update(self.__dict__)
        own.wording = self.wording.renamed(names)
        own.__cause__ = self.__cause__
        return own

    def __str__(self) -> str:
        return str(self.wording)


class UsageError(GgpipeError):
    """The input is wrong."""

    exit_code = 2


class SettingError(UsageError):
    """A setting that is out of bounds, or that contradicts another one."""

    def __init__(self, field: str, problem: str | Wording, advice: str | Wording = "") -> None:
        """`field`: as the name of a `Setting`. `problem` follows it in the message, and `advice` says what to do."""
        super().__init__(Setting(field), " ", problem, *((": ", advice) if advice else ()))
        self.field = field
        self.problem = problem
        self.advice = advice

    def renamed(self, names: Mapping[str, str]) -> Self:
        """The same error with other names of settings."""
        own = super().renamed(names)
        own.field = names.get(self.field, self.field)
        return own


class BodyError(UsageError):
    """A request's body, over HTTP or in a file of prompts. The message has names of its fields."""

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param`: the field that is wrong, `messages[0].content`."""
        super().__init__(message)
        self.param = param


class PromptTooLong(UsageError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, n_prompt: int, n_ctx: int) -> None:
        """Tokens of the prompt, and of the context."""
        super().__init__(
            f"the prompt has {n_prompt} tokens and the context {n_ctx}: raise ",
            Setting("n_ctx"),
            " above the prompt's length",
        )
        self.n_prompt = n_prompt
        self.n_ctx = n_ctx


class ModelError(UsageError):
    """A model file that cannot be used: missing, damaged, of an unsupported kind, not the same everywhere."""


class IndivisibleModelError(ModelError):
    """A model whose layers cannot be split between ranks: a layer needs more than the output of the layer before it."""


class MemoryNeededError(UsageError):
    """A machine has less memory available than its ranks need."""


class LaunchError(UsageError):
    """The number or kind of ranks, their hosts or their mpirun do not fit the settings."""


class StartError(LaunchError):
    """mpirun could not be started, ended, or took too long, before the first rank was connected with the front end."""


class HostError(StartError):
    """mpirun did not start on one of the machines, or lost one, before the first rank was connected."""

    def __init__(self, message: str, report: str = "") -> None:
        """`report`: mpirun's own, of several lines."""
        super().__init__(message)
        self.report = report


class MpiError(LaunchError):
    """This rank cannot connect to the others, so they do not learn of the error."""


class RunError(GgpipeError):
    """Something broke while running."""


class Interrupted(RunError):
    """The user wanted an end before there was a result."""

    exit_code = 130


class QueueFull(RunError):
    """Too many requests wait already: a later one may be taken."""


class RankError(RunError):
    """Another rank broke."""


class SilentRankError(RankError):
    """Another rank sends nothing any more: its process is stopped, or its machine is cut off from the network."""


class Terminated(RunError):
    """This process received SIGTERM, which mpirun sends when a rank is gone."""

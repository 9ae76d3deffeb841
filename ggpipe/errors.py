"""Every error that ggpipe raises on purpose.

A message names a setting as the config records do, in backticks: raise `n_ctx`. The command line shows its flag there.

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

import re
from typing import Self


class GgpipeError(Exception):
    """Base of all; `str()` is one line for the user."""

    exit_code = 1
    is_reported = False
    """It was shown to the user."""

    def reworded(self, message: str) -> Self:
        """The same error with another message."""
        own = type(self).__new__(type(self), message)
        own.__dict__.update(self.__dict__)
        own.__cause__ = self.__cause__
        return own


class UsageError(GgpipeError):
    """The input is wrong."""

    exit_code = 2


class SettingError(UsageError):
    """A setting that is out of bounds, or that contradicts another one. The message starts with its name."""

    @property
    def field(self) -> str:
        """The setting: a field of a config record; those of DraftConfig as `draft.threads`."""
        named = re.match(r"`([\w.]+)`", str(self))
        return named[1] if named else ""


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
            f"the prompt has {n_prompt} tokens and the context {n_ctx}: raise `n_ctx` above the prompt's length"
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

"""Every error that ggpipe raises on purpose.

GgpipeError                exit code 1
├── UsageError             exit code 2: what the user gave is wrong; the message says what to change
│   ├── ModelError         a model file that cannot be used
│   └── LaunchError        ranks, hosts or mpirun do not fit what was asked for
└── RunError               what was asked for was right, but it broke
    ├── RankError          another rank broke
    └── Terminated         this process was told to end, as mpirun does when a rank is gone
"""


class GgpipeError(Exception):
    """Base of all; `str()` is one line for the user."""

    exit_code = 1


class UsageError(GgpipeError):
    """What the user gave is wrong."""

    exit_code = 2


class ModelError(UsageError):
    """A model file that cannot be used: missing, damaged, of a kind that cannot be cut, not the same everywhere."""


class LaunchError(UsageError):
    """The number or kind of ranks does not fit what was asked for."""


class RunError(GgpipeError):
    """Something broke while running."""


class RankError(RunError):
    """Another rank broke."""


class Terminated(RunError):
    """This process was told to end, as mpirun does when a rank is gone."""

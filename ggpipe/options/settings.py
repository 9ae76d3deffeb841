"""Settings that do not concern the engine, as records like those of `config/engine.py`.

Records raise SettingError for values that are out of bounds. `Option.value` checks the values of `Literal` fields.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ggpipe.config.checks import check_choice, check_range
from ggpipe.config.embeddings import MOST_NORM, Pooling
from ggpipe.config.engine import PromptCacheConfig
from ggpipe.config.layer_split import MAX_RANKS, LayerSplits
from ggpipe.config.model import LoadMode
from ggpipe.config.speculation import Mode
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.options.escapes import unescape

Color = Literal["auto", "on", "off"]
BatchFormat = Literal["lines", "specinfer", "openai"]  # as batch.tasks.Format
BatchOutput = Literal["openai", "specinfer"]  # as batch.results.OutputFormat
PlotFormat = Literal["svg", "png", "pdf"]
Confidence = Literal["calibrated", "overconfident", "underconfident", "never-right"]  # as sim.text.Confidence
BENCH_MODES = ("iterative", "speculative", "async", "single")


# Settings of several commands


@dataclass(frozen=True)
class ModelSettings:
    """Model files."""

    target: Path | None = None
    drafts: tuple[Path, ...] = ()

    @property
    def the_draft(self) -> Path | None:
        """The draft model, for a command that supports only one. Raises SettingError for several."""
        self.check_one_draft()
        return self.drafts[0] if self.drafts else None

    def check_one_draft(self) -> None:
        """Raises SettingError for several draft models, for a command that supports only one."""
        if len(self.drafts) > 1:
            raise SettingError(
                "draft.model", f"is given {len(self.drafts)} times: this command supports one draft model"
            )


@dataclass(frozen=True)
class LoadSettings:
    """How to load weights into memory."""

    load_mode: LoadMode = "auto"
    mmap: bool = True
    """If not, `auto` is none."""
    mlock: bool = False

    @property
    def mode(self) -> LoadMode:
        """The three settings combined."""
        chosen: LoadMode = "none" if self.load_mode == "auto" and not self.mmap else self.load_mode
        if self.mlock and chosen in ("auto", "mmap", "none"):
            return "mlock" if chosen == "none" else "mmap+mlock"
        return chosen


@dataclass(frozen=True)
class LoraSettings:
    """LoRA adapters."""

    plain: tuple[Path, ...] = ()
    scaled: tuple[tuple[Path, float], ...] = ()


@dataclass(frozen=True)
class PromptSettings:
    """The prompt, and how many tokens to generate."""

    text: str | None = None
    file: Path | None = None
    escape: bool = True
    """Whether to replace escape sequences, such as a backslash and n."""
    n_predict: int = -1
    """Tokens to generate; -1: until the model stops or the context is full."""

    def __post_init__(self) -> None:
        if self.n_predict < -1:
            raise SettingError("n_predict", f"must be -1 (no limit) or a number of tokens, got {self.n_predict}")

    def read(self) -> str:
        """The prompt. Bytes that are not UTF-8 become surrogates. Raises UsageError."""
        text = self.text
        if (text is None) == (self.file is None):
            raise UsageError(
                "give one prompt: as text with ", Setting("prompt"), ", or as a file with ", Setting("file")
            )
        if self.file is not None:
            try:
                text = self.file.read_bytes().decode("utf-8", "surrogateescape")
            except OSError as e:
                raise SettingError("file", f"{self.file}: cannot read the prompt: {e.strerror}") from e
            text = text.removesuffix(
                "\n"
            )  # as llama.cpp does: editors end files with a newline that is not meant as part of the prompt
        assert text is not None
        return unescape(text) if self.escape else text


@dataclass(frozen=True)
class RankSettings:
    """The ranks, and the layers of each."""

    layer_split: LayerSplits | Literal["auto"] | None = None
    """How the layers are divided. None: the target's layers evenly among all ranks."""
    hostfile: Path | None = None
    restart: int = 0
    """How many times in ten minutes dead ranks are restarted."""

    def __post_init__(self) -> None:
        if self.restart < 0:
            raise SettingError("restart", f"must be 0 (never) or a number of restarts, got {self.restart}")


@dataclass(frozen=True)
class LogSettings:
    """Log messages."""

    verbose: bool = False


@dataclass(frozen=True)
class DisplaySettings:
    """How to draw on the terminal."""

    color: Color = "auto"


# Settings of one command


@dataclass(frozen=True, kw_only=True)
class PromptCacheFile:
    """The prompt cache of `generate`: its file, and what to write to it."""

    path: Path | None = None
    all: bool = False
    read_only: bool = False

    @property
    def config(self) -> PromptCacheConfig | None:
        """The prompt cache, or None. Raises SettingError for settings without a file."""
        if self.path is None:
            if self.all or self.read_only:
                name = "prompt_cache_ro" if self.read_only else "prompt_cache_all"
                raise SettingError(name, "needs a file", Wording("name it with ", Setting("prompt_cache")))
            return None
        return PromptCacheConfig(self.path, "nothing" if self.read_only else "text" if self.all else "prompt")


@dataclass(frozen=True, kw_only=True)
class GenerateOutput:
    """The output of `generate`."""

    display_prompt: bool = True
    csv: Path | None = None
    json: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The input and output of `batch`."""

    input: Path = Path()
    output: Path = Path()
    format: BatchFormat | None = None
    """None: detected."""
    output_format: BatchOutput = "openai"


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Embeddings, for requests that do not say otherwise."""

    pooling: Pooling | None = None
    """How to pool token embeddings. None: the model's own way."""
    embd_normalize: int = 2
    """How to normalize embeddings, see `text.embeddings.normalized`."""

    def __post_init__(self) -> None:
        check_range("embd_normalize", self.embd_normalize, -1, MOST_NORM)


@dataclass(frozen=True)
class ChatOutput:
    """How `chat` shows answers."""

    markdown: bool = True


@dataclass(frozen=True)
class DemoSettings:
    """The models of `demo`."""

    tiny: bool = False
    """Use the bundled models without inflating them."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """What `bench` measures, and the files for its results."""

    files: tuple[Path, ...] = ()
    """Prompts. Empty: the bundled ones."""
    rounds: int = 5
    full_length: bool = True
    """Ignore the end of text, so that all outputs have the same length."""
    modes: tuple[str, ...] = ()
    """Empty: all that are possible or, to compare layouts, the fastest."""
    layouts: tuple[str, ...] = ()
    """Layer splits to compare. Empty: the layers are divided evenly among the ranks."""
    csv: Path | None = None
    json: Path | None = None
    receipt: Path | None = None
    profile_seconds: float = 15.0
    """Seconds to measure the machines for the receipt."""
    plots: Path | None = None
    plot_format: PlotFormat = "svg"
    trace: Path | None = None

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise SettingError("rounds", f"must be 1 or more, got {self.rounds}")
        _check_measuring(None, self.profile_seconds)
        for mode in self.modes:
            check_choice("modes", mode, BENCH_MODES)
        for i, text in enumerate(self.layouts):
            if text in self.layouts[:i]:
                raise SettingError("layouts", f"names {text} twice", "name each layout once")
        if len(self.layouts) > 1 and "single" in self.modes:
            raise SettingError(
                "modes", "single cannot be compared with layouts", "add the layout 1.0 (one rank) instead"
            )


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The prompts and the output of `record`."""

    files: tuple[Path, ...] = ()
    candidates: int = 8
    output: Path = Path("recording.json")

    def __post_init__(self) -> None:
        if not 2 <= self.candidates <= 100:
            raise SettingError("candidates", f"must be a number from 2 to 100, got {self.candidates}")


@dataclass(frozen=True)
class ProfileSettings:
    """What `profile` measures, and its output."""

    layers: tuple[int, int] | None = None
    """The first layer, and the one after the last layer."""
    n_ranks: int | None = None
    seconds: float = 15.0
    output: Path | None = None

    def __post_init__(self) -> None:
        _check_measuring(self.n_ranks, self.seconds)


@dataclass(frozen=True)
class ClusterSettings:
    """The cluster to simulate, or to plan for."""

    path: Path | None = None
    """A cluster file, the name of a bundled one, or a profile."""


@dataclass(frozen=True, kw_only=True)
class SimulatedText:
    """The prompt and output of a simulation, and how often the draft model is right."""

    n_predict: int = -1
    """Tokens to generate; -1: 256, or as many as were recorded."""
    prompt_tokens: int = 128
    acceptance: float | None = None
    """Probability that the draft's best candidate is the target's token. None: 0.7, or as recorded."""
    second_choice: float | None = None
    """Probability that the draft's second choice is the target's token where the best one is not. None: 0.24, or as
    recorded."""
    confidence: Confidence = "calibrated"
    recording: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_predict < 1 and self.n_predict != -1:
            raise SettingError(
                "n_predict", f"must be -1 (the default) or a number of tokens, 1 or more, got {self.n_predict}"
            )


@dataclass(frozen=True, slots=True)
class SimulatedDrafter:
    """A drafter of a simulation."""

    kind: str
    """As in `core.drafters.registry`."""
    share: float | None = None
    """How often its best candidate is the target's token; of n-grams, how much of the output repeats earlier text.
    None: as the output says."""


@dataclass(frozen=True, kw_only=True)
class SimulatedDrafters:
    """The drafters of a simulation."""

    drafters: tuple[SimulatedDrafter, ...] | None = None
    """None: the draft model's, and n-grams."""
    overlap: float = 0.5
    """Share of positions at which further draft models are right or wrong with the first one."""

    @property
    def kinds(self) -> tuple[str, ...] | None:
        """The names of the drafters, each once; None: the default ones."""
        return None if self.drafters is None else tuple(dict.fromkeys(drafter.kind for drafter in self.drafters))


@dataclass(frozen=True, kw_only=True)
class SimulatedTraffic:
    """The requests of a simulation, see `sim.arrivals.Traffic`. By default there is one."""

    users: int | None = None
    rate: float | None = None
    requests: int | None = None
    arrivals: Path | None = None
    concurrent: int | None = None
    requests_csv: Path | None = None

    @property
    def is_given(self) -> bool:
        """Whether there are several requests."""
        return any(value is not None for value in (self.users, self.rate, self.requests, self.arrivals))

    def __post_init__(self) -> None:
        for name in ("concurrent", "requests_csv"):
            if getattr(self, name) is not None and not self.is_given:
                raise SettingError(
                    name, "needs several requests", Wording("give ", Setting("users"), " or ", Setting("rate"))
                )


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """What `simulate` varies, and the files for its results."""

    against: Path | None = None
    """A receipt to simulate, instead of a cluster."""
    sweep: tuple[str, ...] = ()
    csv: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True)
class PlanSettings:
    """Constraints for a plan, and its output."""

    mode: Mode | None = None
    """None: the fastest."""
    n_ranks: int | None = None
    """Number of ranks, including those that draft. None: whatever is fastest."""
    seconds: float = 6.0
    json: Path | None = None
    users: int | None = None
    """Number of users who share the pipeline. None: one request at a time."""

    def __post_init__(self) -> None:
        _check_measuring(self.n_ranks, self.seconds)


def _check_measuring(n_ranks: int | None, seconds: float) -> None:
    if n_ranks is not None:
        check_range("n_ranks", n_ranks, 1, MAX_RANKS, "a number of ranks")
    if not (math.isfinite(seconds) and seconds > 0):
        raise SettingError("seconds", f"must be positive, got {seconds:g}")

"""Settings beside the engine's, as records like those of `config/engine.py`.

A record raises SettingError for a value that is out of bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ggpipe.config.checks import check_choice, check_range
from ggpipe.config.embeddings import MOST_NORM, Pooling
from ggpipe.config.engine import PromptCacheConfig
from ggpipe.config.layer_split import LayerSplits
from ggpipe.config.model import LoadMode
from ggpipe.config.speculation import Mode
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.options.escapes import unescape

Color = Literal["auto", "on", "off"]
BatchFormat = Literal["lines", "specinfer", "openai"]  # as batch.tasks.Format
BatchOutput = Literal["openai", "specinfer"]  # as batch.results.OutputFormat
PlotFormat = Literal["svg", "png", "pdf"]
Confidence = Literal["calibrated", "overconfident", "underconfident"]  # as sim.text.Confidence
BENCH_MODES = ("iterative", "speculative", "async", "single")


# Settings that several commands have


@dataclass(frozen=True)
class ModelSettings:
    """The model files."""

    target: Path | None = None
    drafts: tuple[Path, ...] = ()

    @property
    def the_draft(self) -> Path | None:
        """The draft model, for a command that takes one at most. Raises UsageError for several."""
        self.check_one_draft()
        return self.drafts[0] if self.drafts else None

    def check_one_draft(self) -> None:
        """Raises UsageError for several draft models, for a command that takes one at most."""
        if len(self.drafts) > 1:
            raise SettingError(
                "draft.model", f"is given {len(self.drafts)} times, and this command takes one draft model"
            )


@dataclass(frozen=True)
class LoadSettings:
    """How weights are loaded into memory."""

    load_mode: Literal["auto"] | LoadMode = "auto"
    mmap: bool = True
    """Makes `auto` mmap, or none."""
    mlock: bool = False

    def __post_init__(self) -> None:
        check_choice("load_mode", self.load_mode, ("auto", *get_args(LoadMode)))

    @property
    def mode(self) -> LoadMode:
        """The three settings as one."""
        chosen: LoadMode = ("mmap" if self.mmap else "none") if self.load_mode == "auto" else self.load_mode
        if self.mlock and chosen in ("mmap", "none"):
            return "mmap+mlock" if chosen == "mmap" else "mlock"
        return chosen


@dataclass(frozen=True)
class LoraSettings:
    """LoRA adapters."""

    plain: tuple[Path, ...] = ()
    scaled: tuple[tuple[Path, float], ...] = ()


@dataclass(frozen=True)
class PromptSettings:
    """The text to continue, and how far."""

    text: str | None = None
    file: Path | None = None
    escape: bool = True
    """Escape sequences of the text, such as a backslash and n, are replaced."""
    n_predict: int = -1
    """Tokens to generate; -1 is until the text ends or the context is full."""

    def __post_init__(self) -> None:
        if self.n_predict < -1:
            raise SettingError(
                "n_predict", f"must be -1 (until the text ends) or a number of tokens, got {self.n_predict}"
            )

    def read(self) -> str:
        """The text to continue; bytes that are not UTF-8 are surrogates in it."""
        text = self.text
        if (text is None) == (self.file is None):
            raise UsageError("give one prompt: a text with ", Setting("prompt"), ", or a file with ", Setting("file"))
        if self.file is not None:
            try:
                text = self.file.read_bytes().decode("utf-8", "surrogateescape")
            except OSError as e:
                raise SettingError("file", f"{self.file}: cannot read the prompt: {e.strerror}") from e
            text = text.removesuffix("\n")  # as llama.cpp: editors end files with a newline that no prompt means
        assert text is not None
        return unescape(text) if self.escape else text


@dataclass(frozen=True)
class RankSettings:
    """The ranks, and what each of them holds."""

    layer_split: LayerSplits | Literal["auto"] | None = None
    """How models' layers are divided; None spreads the target's layers evenly over the ranks."""
    hostfile: Path | None = None
    restart: int = 0
    """Ranks that died are started again, at most so many times in ten minutes."""

    def __post_init__(self) -> None:
        if self.restart < 0:
            raise SettingError("restart", f"must be 0 (never) or a number of restarts, got {self.restart}")


@dataclass(frozen=True)
class LogSettings:
    """Messages beside the result."""

    verbose: bool = False


# Settings of one command


@dataclass(frozen=True, kw_only=True)
class PromptCacheFile:
    """The file of `generate` for what was computed, and what is written to it."""

    path: Path | None = None
    all: bool = False
    read_only: bool = False

    @property
    def config(self) -> PromptCacheConfig | None:
        """None: there is none. Raises SettingError for settings of a file that has no name."""
        if self.path is None:
            if self.all or self.read_only:
                name = "prompt_cache_ro" if self.read_only else "prompt_cache_all"
                raise SettingError(name, "needs a file", Wording("name one with ", Setting("prompt_cache")))
            return None
        return PromptCacheConfig(self.path, "nothing" if self.read_only else "text" if self.all else "prompt")


@dataclass(frozen=True, kw_only=True)
class GenerateOutput:
    """The output of `generate`: on the terminal and in files."""

    color: Color = "auto"
    display_prompt: bool = True
    csv: Path | None = None
    json: Path | None = None
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_choice("color", self.color, get_args(Color))


@dataclass(frozen=True, kw_only=True)
class BatchSettings:
    """The files of `batch`."""

    input: Path = Path()
    output: Path = Path()
    format: BatchFormat | None = None
    """None: what the file looks like."""
    output_format: BatchOutput = "openai"
    color: Color = "auto"

    def __post_init__(self) -> None:
        check_choice("color", self.color, get_args(Color))
        if self.format is not None:
            check_choice("format", self.format, get_args(BatchFormat))
        check_choice("output_format", self.output_format, get_args(BatchOutput))


@dataclass(frozen=True, kw_only=True)
class EmbeddingSettings:
    """Of embeddings, where a request does not say it."""

    pooling: Pooling | None = None
    """How they are made; None: as the model's file says."""
    embd_normalize: int = 2
    """How they are normalized, as `embeddings.normalized` says."""

    def __post_init__(self) -> None:
        if self.pooling is not None:
            check_choice("pooling", self.pooling, get_args(Pooling))
        check_range("embd_normalize", self.embd_normalize, -1, MOST_NORM)


@dataclass(frozen=True)
class ChatOutput:
    """What `chat` shows on the terminal."""

    color: Color = "auto"
    markdown: bool = True
    """Answers are laid out."""

    def __post_init__(self) -> None:
        check_choice("color", self.color, get_args(Color))


@dataclass(frozen=True)
class DemoSettings:
    """What `demo` shows."""

    tiny: bool = False
    """The bundled models as they are, not inflated."""


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """The work of `bench`, and the files for its results."""

    files: tuple[Path, ...] = ()
    """Prompts; empty: those that ggpipe brings along."""
    rounds: int = 5
    full_length: bool = True
    """The model's end of text is never sampled: all texts have the same length."""
    modes: tuple[str, ...] = ()
    """Empty: all that are possible; where layouts are compared, the fastest one."""
    layouts: tuple[str, ...] = ()
    """Layer splits, to be compared where there are several. Empty: the layers are spread evenly over the
    ranks."""
    color: Color = "auto"
    csv: Path | None = None
    json: Path | None = None
    plots: Path | None = None
    plot_format: PlotFormat = "svg"
    trace: Path | None = None

    def __post_init__(self) -> None:
        check_choice("color", self.color, get_args(Color))
        check_choice("plot_format", self.plot_format, get_args(PlotFormat))
        if self.rounds < 1:
            raise SettingError("rounds", f"must be 1 or more, got {self.rounds}")
        for mode in self.modes:
            check_choice("modes", mode, BENCH_MODES)
        for i, text in enumerate(self.layouts):
            if text in self.layouts[:i]:
                raise SettingError("layouts", f"names {text} twice", "give each layout once")
        if len(self.layouts) > 1 and "single" in self.modes:
            raise SettingError(
                "modes", Wording("single is not for several ", Setting("layouts")), "name 1.0, one rank, as one of them"
            )


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """The prompts of `record`, and its output."""

    files: tuple[Path, ...] = ()
    candidates: int = 8
    output: Path = Path("recording.json")

    def __post_init__(self) -> None:
        if not 2 <= self.candidates <= 100:
            raise SettingError("candidates", f"must be a number from 2 to 100, got {self.candidates}")


@dataclass(frozen=True)
class ProfileSettings:
    """The work of `profile`, and its output."""

    layers: tuple[int, int] | None = None
    """The first layer, and the one after the last."""
    n_ranks: int | None = None
    seconds: float = 15.0
    output: Path | None = None

    def __post_init__(self) -> None:
        _check_measuring(self.n_ranks, self.seconds)


@dataclass(frozen=True)
class ClusterSettings:
    """The cluster that `simulate` and `plan` are about."""

    path: Path | None = None
    """A cluster file, the name of one that ggpipe brings along, or a profile."""


@dataclass(frozen=True, kw_only=True)
class SimulatedText:
    """The text that a simulation generates, and how often the draft is right."""

    n_predict: int = -1
    """Tokens to generate; -1 is 256, or as many as were recorded."""
    prompt_tokens: int = 128
    acceptance: float | None = None
    """How often the draft's best candidate is the target's token. None: 0.7, or as was recorded."""
    confidence: Confidence = "calibrated"
    recording: Path | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.n_predict < 1 and self.n_predict != -1:
            raise SettingError("n_predict", f"must be 1 or more, or -1 (as many as usual), got {self.n_predict}")
        check_choice("confidence", self.confidence, get_args(Confidence))


@dataclass(frozen=True, kw_only=True)
class SimulatedTraffic:
    """The requests of a simulation, see `sim.arrivals.Traffic`. Without any of these there is one request."""

    users: int | None = None
    rate: float | None = None
    requests: int | None = None
    arrivals: Path | None = None
    concurrent: int | None = None
    requests_csv: Path | None = None

    @property
    def is_given(self) -> bool:
        """There are several requests."""
        return any(value is not None for value in (self.users, self.rate, self.requests, self.arrivals))

    def __post_init__(self) -> None:
        for name in ("concurrent", "requests_csv"):
            if getattr(self, name) is not None and not self.is_given:
                raise SettingError(
                    name,
                    "is for several requests",
                    Wording(
                        "name ",
                        Setting("users"),
                        ", ",
                        Setting("rate"),
                        ", ",
                        Setting("requests"),
                        " or ",
                        Setting("arrivals"),
                    ),
                )


@dataclass(frozen=True, kw_only=True)
class SimulateSettings:
    """The sweeps of `simulate`, and the files for its results."""

    sweep: tuple[str, ...] = ()
    csv: Path | None = None
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None


@dataclass(frozen=True)
class PlanSettings:
    """The bounds of a plan, and its output."""

    mode: Mode | None = None
    """None: the fastest."""
    n_ranks: int | None = None
    """Ranks, the draft's included; None: as many as are fastest."""
    seconds: float = 6.0
    json: Path | None = None
    users: int | None = None
    """Users who share the pipeline; None: one request at a time."""

    def __post_init__(self) -> None:
        if self.mode is not None:
            check_choice("mode", self.mode, get_args(Mode))
        _check_measuring(self.n_ranks, self.seconds)


def _check_measuring(n_ranks: int | None, seconds: float) -> None:
    if n_ranks is not None and n_ranks < 1:
        raise SettingError("n_ranks", f"must be a number of ranks, 1 or more, got {n_ranks}")
    if not (math.isfinite(seconds) and seconds > 0):
        raise SettingError("seconds", f"must be a time above 0, got {seconds:g}")

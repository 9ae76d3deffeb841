"""Recordings, which `ggpipe record` writes and simulations replay, as files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from ggpipe.cluster.decode import decode
from ggpipe.core.draft_messages import Candidates
from ggpipe.errors import UsageError

BUNDLED = Path(__file__).parents[1] / "models" / "tales-recording.json"
"""The demo pair, greedy, with the beginnings of three tales as prompts."""

_FORMAT, _VERSION = "ggpipe recording", 1
_DIGITS = 5

RecordedToken = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Flat = Annotated[tuple[Annotated[float, Meta(ge=0, le=2**31 - 1)], ...], Meta(min_length=2)]
"""Candidates in the file: token, probability, token, probability, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt with the target's output, and the draft's candidates along it."""

    name: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    """Tokens of the output."""
    candidates: tuple[Candidates, ...]
    """Candidates for each token of the output."""
    after_rejection: tuple[Candidates, ...]
    """For each token: candidates for the next position if the best rejected candidate had been in its place."""

    @property
    def agrees(self) -> tuple[bool, ...]:
        """For each token of the output: whether it is the draft's best candidate."""
        return tuple(best[0][0] == token for best, token in zip(self.candidates, self.text, strict=True))

    @property
    def confidence(self) -> tuple[float, ...]:
        """For each token of the output: the probability of the draft's best candidate."""
        return tuple(best[0][1] for best in self.candidates)

    @property
    def second_choices(self) -> tuple[SecondChoice, ...]:
        """The draft's second-best candidate for each token of the output that is not its best one."""
        found, n_right = [], 0
        for own, token in zip(self.candidates, self.text, strict=True):
            if own[0][0] == token:
                n_right += 1
                continue
            second, probability = own[1] if len(own) > 1 else (None, 0.0)
            found.append(SecondChoice(probability=probability, is_right=second == token, most_depth=1 + n_right))
            n_right = 0
        return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondChoice:
    """A draft's second-best candidate for a token that is not its best one."""

    probability: float
    """As the draft gave it; 0 if only the best one was recorded."""
    is_right: bool
    """It is the token."""
    most_depth: int
    """A chain of best candidates that begins at one of the tokens before has its first mistake here: at a depth of 1 to
    this many tokens."""


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of the recorded pair."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A recording of a pair of models."""

    target: ModelName
    draft: ModelName
    seed: int
    sampling: dict[str, Any]
    """How tokens were sampled, with the names of SamplingConfig."""
    prompts: tuple[RecordedPrompt, ...]

    @property
    def agreement(self) -> float:
        """Share of all tokens that are the draft's best candidate."""
        agrees = [agrees_here for prompt in self.prompts for agrees_here in prompt.agrees]
        return sum(agrees) / len(agrees)

    @property
    def second_choices(self) -> tuple[SecondChoice, ...]:
        """Those of all prompts."""
        return tuple(choice for prompt in self.prompts for choice in prompt.second_choices)

    @property
    def second_agreement(self) -> float | None:
        """Share of second-best candidates that are right where the best one is not; None if it always is."""
        choices = self.second_choices
        return sum(choice.is_right for choice in choices) / len(choices) if choices else None


class _Prompt(Struct, frozen=True):
    """A prompt as it is stored in the file."""

    name: str
    prompt: Annotated[tuple[RecordedToken, ...], Meta(min_length=1)]
    text: tuple[RecordedToken, ...]
    candidates: tuple[Flat, ...]
    after_rejection: tuple[Flat, ...] = ()
    astray: tuple[Flat, ...] = ()
    """`after_rejection` in older files."""

    def recorded(self) -> RecordedPrompt:
        after_rejection = self.after_rejection or self.astray
        if not len(self.text) == len(self.candidates) == len(after_rejection) > 0:
            raise ValueError(f"the output of {self.name} and its candidates differ in length")
        return RecordedPrompt(
            name=self.name,
            prompt=self.prompt,
            text=self.text,
            candidates=tuple(map(_paired, self.candidates)),
            after_rejection=tuple(map(_paired, after_rejection)),
        )


class _File(Struct, frozen=True):
    target: ModelName
    draft: ModelName
    seed: int
    sampling: dict[str, Any]
    prompts: Annotated[tuple[_Prompt, ...], Meta(min_length=1)]


def dump(recording: Recording) -> str:
    """The recording as JSON, with one line per field of each prompt. Probabilities are rounded to 5 digits."""
    head: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "target": asdict(recording.target),
        "draft": asdict(recording.draft),
        "seed": recording.seed,
        "sampling": recording.sampling,
        "agreement": round(recording.agreement, _DIGITS),
    }
    if (second := recording.second_agreement) is not None:
        head["second_agreement"] = round(second, _DIGITS)
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    prompts = []
    for recorded in recording.prompts:
        parts = {
            "name": recorded.name,
            "prompt": recorded.prompt,
            "text": recorded.text,
            "candidates": _flat(recorded.candidates),
            "after_rejection": _flat(recorded.after_rejection),
        }
        rows = (f"{json.dumps(name)}: {json.dumps(part, separators=(',', ':'))}" for name, part in parts.items())
        prompts.append("{" + ",\n".join(rows) + "}")
    return "{" + ",\n".join([*lines, '"prompts": [' + ",\n".join(prompts) + "]"]) + "}\n"


def read(path: Path) -> Recording:
    """Read a recording from a file. Raises UsageError, with the reason, if it cannot be read or is invalid."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read the recording {path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _unusable(path, "it is not JSON") from e
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _unusable(path, f'its format is not "{_FORMAT}"')
    if content.get("version") != _VERSION:
        raise _unusable(path, f"it has version {content.get('version')}, but this ggpipe reads version {_VERSION}")
    try:
        file = decode(content, _File)
        prompts = tuple(prompt.recorded() for prompt in file.prompts)
    except ValueError as e:
        raise _unusable(path, str(e)) from e
    return Recording(target=file.target, draft=file.draft, seed=file.seed, sampling=file.sampling, prompts=prompts)


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is not a usable recording: {why}; make one with ggpipe record")


def _flat(positions: Sequence[Candidates]) -> list[list[int | float]]:
    return [[value for token, prob in position for value in (token, round(prob, _DIGITS))] for position in positions]


def _paired(flat: Flat) -> Candidates:
    """The candidates of one position: the inverse of `_flat`. Raises ValueError if they are invalid."""
    tokens, probs = [int(token) for token in flat[::2] if token.is_integer()], flat[1::2]
    falls = all(1 >= a >= b >= 0 for a, b in zip((1.0, *probs), (*probs, 0.0), strict=True))
    if len(tokens) != len(probs) or len(set(tokens)) < len(tokens) or not falls:
        raise ValueError("candidates are tokens, each with its probability, the most likely first")
    return tuple(zip(tokens, probs, strict=True))

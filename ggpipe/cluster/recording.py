"""Recordings as files: what `ggpipe record` writes and simulations play back."""

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
"""The demo pair after three openings of tales, greedy."""

_FORMAT, _VERSION = "ggpipe recording", 1
_DIGITS = 5

RecordedToken = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Flat = Annotated[tuple[Annotated[float, Meta(ge=0, le=2**31 - 1)], ...], Meta(min_length=2)]
"""Candidates in the file: a token, its probability, the next token, …"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt:
    """One prompt with the target's text, and the draft's candidates along it."""

    name: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    candidates: tuple[Candidates, ...]
    """For each token of the text."""
    after_rejection: tuple[Candidates, ...]
    """For the position after each token, had the draft's best rejected candidate been taken there."""

    @property
    def agrees(self) -> tuple[bool, ...]:
        """For each token of the text: it is the draft's best candidate."""
        return tuple(best[0][0] == token for best, token in zip(self.candidates, self.text, strict=True))

    @property
    def confidence(self) -> tuple[float, ...]:
        """The best candidates' probabilities."""
        return tuple(best[0][1] for best in self.candidates)


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model of the recorded pair."""

    name: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A pair of models, and what was recorded of it."""

    target: ModelName
    draft: ModelName
    seed: int
    sampling: dict[str, Any]
    """How the text was drawn; names as in SamplingConfig."""
    prompts: tuple[RecordedPrompt, ...]

    @property
    def agreement(self) -> float:
        """Share of the texts' tokens that are the draft's best candidate."""
        agrees = [agrees_here for prompt in self.prompts for agrees_here in prompt.agrees]
        return sum(agrees) / len(agrees)


class _Prompt(Struct, frozen=True):
    """A take as it stands in a file."""

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
            raise ValueError(f"the text of {self.name} and its candidates differ in length")
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
    """As JSON, one line for each prompt's part; probabilities are rounded to 5 digits."""
    head = {
        "format": _FORMAT,
        "version": _VERSION,
        "target": asdict(recording.target),
        "draft": asdict(recording.draft),
        "seed": recording.seed,
        "sampling": recording.sampling,
        "agreement": round(recording.agreement, _DIGITS),
    }
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
    """Raises UsageError for a file that is missing or that is no recording."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read the recording {path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise _unusable(path, "it is no JSON") from e
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _unusable(path, f'its format is not "{_FORMAT}"')
    if content.get("version") != _VERSION:
        raise _unusable(path, f"it has version {content.get('version')}, this ggpipe reads version {_VERSION}")
    try:
        file = decode(content, _File)
        prompts = tuple(prompt.recorded() for prompt in file.prompts)
    except ValueError as e:
        raise _unusable(path, str(e)) from e
    return Recording(target=file.target, draft=file.draft, seed=file.seed, sampling=file.sampling, prompts=prompts)


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no usable recording: {why}; make one with ggpipe record")


def _flat(positions: Sequence[Candidates]) -> list[list[int | float]]:
    return [[value for token, prob in position for value in (token, round(prob, _DIGITS))] for position in positions]


def _paired(flat: Flat) -> Candidates:
    """The inverse of `_flat`, for one position."""
    tokens, probs = [int(token) for token in flat[::2] if token.is_integer()], flat[1::2]
    falls = all(1 >= a >= b >= 0 for a, b in zip((1.0, *probs), (*probs, 0.0), strict=True))
    if len(tokens) != len(probs) or len(set(tokens)) < len(tokens) or not falls:
        raise ValueError("candidates are tokens, each with its probability, the most probable first")
    return tuple(zip(tokens, probs, strict=True))

"""Recordings as files: what `ggpipe record` writes and simulations play back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ggpipe.errors import UsageError
from ggpipe.sim.tokens import Candidates, RecordedTokens

BUNDLED = Path(__file__).parents[1] / "models" / "tales-recording.json"
"""The demo pair after three openings of tales, greedy."""

_FORMAT, _VERSION = "ggpipe recording", 1
_DIGITS = 5
_MOST_TOKEN = 2**31 - 1


@dataclass(frozen=True)
class Take:
    """One prompt with the target's text, and what the draft says to it."""

    name: str
    prompt: tuple[int, ...]
    text: tuple[int, ...]
    candidates: tuple[Candidates, ...]
    """For each token of the text."""
    astray: tuple[Candidates, ...]
    """For the place after each, had the draft's best wrong candidate been taken there."""

    @property
    def right(self) -> tuple[bool, ...]:
        """Where the draft's best candidate is the text's token."""
        return tuple(best[0][0] == token for best, token in zip(self.candidates, self.text, strict=True))

    @property
    def confidence(self) -> tuple[float, ...]:
        """The best candidates' probabilities."""
        return tuple(best[0][1] for best in self.candidates)


@dataclass(frozen=True)
class ModelName:
    """A model as a recording tells of it."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class Recording:
    """A pair of models, and what was recorded of it."""

    target: ModelName
    draft: ModelName
    seed: int
    sampling: dict[str, Any]
    """How the text was drawn; names as in SamplingConfig."""
    takes: tuple[Take, ...]

    @property
    def agreement(self) -> float:
        """Share of places where the draft's best candidate is the text's token."""
        right = [is_right for take in self.takes for is_right in take.right]
        return sum(right) / len(right)

    def requests(self, n_text: int | None = None) -> tuple[RecordedTokens, ...]:
        """To be played back, one for each prompt, with `n_text` tokens; None: as many as were recorded."""
        return tuple(RecordedTokens(t.prompt, t.text, t.candidates, t.astray, n_text) for t in self.takes)


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
    takes = []
    for take in recording.takes:
        parts = {
            "name": take.name,
            "prompt": take.prompt,
            "text": take.text,
            "candidates": _flat(take.candidates),
            "astray": _flat(take.astray),
        }
        rows = (f"{json.dumps(name)}: {json.dumps(part, separators=(',', ':'))}" for name, part in parts.items())
        takes.append("{" + ",\n".join(rows) + "}")
    return "{" + ",\n".join([*lines, '"prompts": [' + ",\n".join(takes) + "]"]) + "}\n"


def read(path: Path) -> Recording:
    """Raises UsageError for a file that is missing or that is no recording."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read the recording {path}: {e.strerror}") from e
    except (ValueError, RecursionError) as e:
        raise _unusable(path, "it is no JSON") from e
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise _unusable(path, f'it does not say that it is a "{_FORMAT}"')
    if content.get("version") != _VERSION:
        raise _unusable(path, f"it has version {content.get('version')}, this ggpipe reads version {_VERSION}")
    try:
        recording = Recording(
            ModelName(*(_text(content["target"][key]) for key in ("name", "fingerprint"))),
            ModelName(*(_text(content["draft"][key]) for key in ("name", "fingerprint"))),
            int(content["seed"]),
            dict(content["sampling"]),
            tuple(_take(take) for take in content["prompts"]),
        )
    except KeyError as e:
        raise _unusable(path, f"{e} is missing") from e
    except (TypeError, AttributeError) as e:
        raise _unusable(path, "a part of it is of another kind than it should be") from e
    except (ValueError, ArithmeticError) as e:
        raise _unusable(path, str(e)) from e
    if not recording.takes:
        raise _unusable(path, "it holds no prompt")
    return recording


def _unusable(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is no usable recording: {why}; make one with ggpipe record")


def _take(content: dict[str, Any]) -> Take:
    prompt, text = (tuple(_token(token) for token in content[key]) for key in ("prompt", "text"))
    candidates, astray = (tuple(_paired(place) for place in content[key]) for key in ("candidates", "astray"))
    if not prompt or not len(text) == len(candidates) == len(astray) > 0:
        raise ValueError("a prompt is empty, or its text has another length than what the draft says to it")
    return Take(_text(content["name"]), prompt, text, candidates, astray)


def _flat(places: Sequence[Candidates]) -> list[list[int | float]]:
    return [[value for token, prob in place for value in (token, round(prob, _DIGITS))] for place in places]


def _paired(flat: Sequence[Any]) -> Candidates:
    """The inverse of `_flat`, for one place."""
    tokens, probs = [_token(token) for token in flat[::2]], [float(prob) for prob in flat[1::2]]
    falls = all(1 >= a >= b >= 0 for a, b in zip([1.0, *probs], [*probs, 0.0], strict=True))
    if not probs or len(tokens) != len(probs) or len(set(tokens)) < len(tokens) or not falls:
        raise ValueError("candidates are tokens, each with its probability, the most probable first")
    return tuple(zip(tokens, probs, strict=True))


def _token(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKEN:
        raise ValueError(f"{value!r:.40} is no token")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no name")
    return value

"""What a training run keeps on disk, so that a second run of the same command continues the first.

A folder has `stages.json` (each stage's settings, and whether it is finished) and the stages' own files. A stage
that began with other settings is refused rather than thrown away: it may have taken hours.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType

STAGES = ("tokenizer", "target", "outputs", "draft", "second-draft", "head", "report")

Settings = Mapping[str, int | float | str]


class InputError(ValueError):
    """What the user gave cannot be trained on."""


class StoppedError(Exception):
    """The run was asked to stop; what it had is saved."""


class Workspace:
    """The folder of a run. Raises OSError where it cannot be written, InputError where it is not such a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._index = folder / "stages.json"
        try:
            self._stages: dict[str, dict[str, object]] = json.loads(self._index.read_text())
        except FileNotFoundError:
            self._stages = {}
        except ValueError as exc:
            raise InputError(f"{self._index} is damaged ({exc}); delete {folder} to start over") from exc

    def path(self, name: str) -> Path:
        """Where a stage keeps a file."""
        return self.folder / name

    def begin(self, stage: str, settings: Settings) -> bool:
        """Whether there is anything to do. Raises InputError where the stage began with other settings."""
        known = self._stages.get(stage)
        if known is None:
            self._stages[stage] = {"settings": dict(settings), "finished": False}
            self._save()
            return True
        had = known["settings"]
        assert isinstance(had, dict)
        for name in sorted(had.keys() | settings.keys()):
            if had.get(name) != settings.get(name):
                raise InputError(
                    f"stage {stage} in {self.folder} began with {name} = {had.get(name)}, not {settings.get(name)}: "
                    f"give the same settings, another --work, or delete {self.folder / stage}.*"
                    f" and the stage's entry in {self._index.name}"
                )
        return not known["finished"]

    def finish(self, stage: str) -> None:
        """Mark a stage as finished: its files are complete."""
        self._stages[stage]["finished"] = True
        self._save()

    def finished(self, stage: str) -> bool:
        """Whether a stage is complete."""
        return bool(self._stages.get(stage, {}).get("finished"))

    def _save(self) -> None:
        with replacing(self._index) as path:
            path.write_text(json.dumps(self._stages, indent=1) + "\n")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` once it is complete."""
    part = path.with_name(f"{path.name}.part")
    yield part
    os.replace(part, path)


class Stop:
    """Says when to save: every `every_s` seconds; and to stop: at SIGTERM, SIGINT, or after `minutes`, 0 for never."""

    def __init__(self, minutes: float = 0, every_s: float = 120, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._every_s = clock, every_s
        self._end_s = clock() + 60 * minutes if minutes else float("inf")
        self._saved_s = clock()
        self._signalled = False

    def listen(self) -> None:
        """Take SIGTERM and SIGINT as requests to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    @property
    def requested(self) -> bool:
        """Whether the run should save and stop."""
        return self._signalled or self._clock() >= self._end_s

    def save_due(self) -> bool:
        """Whether it is time for a checkpoint; if so, the next one is due `every_s` later."""
        if not self.requested and self._clock() - self._saved_s < self._every_s:
            return False
        self._saved_s = self._clock()
        return True

"""The stages of a run, in order; each continues from what the workspace has of it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scripts.models.demo_pair import distillation, eagle, files, induction, outputs, report
from scripts.models.demo_pair.corpus import TURN, Tasks, keep_back, read_tales
from scripts.models.demo_pair.llama import Model, Shape, logits
from scripts.models.demo_pair.tokens import Batches, even_windows, stream_of, train_tokenizer
from scripts.models.demo_pair.training import Plan, fit
from scripts.models.demo_pair.workspace import InputError, Stop, Workspace

with contextlib.suppress(ImportError):  # --help works without
    import torch
    import torch.nn.functional as F
    from tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MIXTURE = {"text": 3, "tell": 2, "copy": 2, "echo": 1}  # windows of a batch of the target's
# Low frequencies of rotary positions, which compare tokens wherever they are, in half of wide heads: what copying needs
TARGET = functools.partial(Shape, width=256, layers=8, heads=4, kv_heads=2, wide=768, rope_base=1e6)
DRAFT = functools.partial(Shape, width=192, layers=3, heads=3, kv_heads=3, wide=320, rope_base=1e6)


@dataclass(frozen=True, kw_only=True)
class Order:
    """What to train, from which text, and where it goes; see the command's options."""

    text: Path
    out_dir: Path
    stages: tuple[str, ...]
    target: Path | None  # a finished model instead of training one
    draft: Path | None
    window: int
    target_steps: int
    draft_steps: int
    second_draft_steps: int
    head_steps: int
    samples: int
    seed: int
    bfloat16: bool  # the target's layers are computed in it


class Training:
    """One run: `run` carries out the stages that the order names and that are not finished."""

    def __init__(self, order: Order, work: Workspace, stop: Stop) -> None:
        self.order, self.work, self.stop = order, work, stop
        self.tales, held = keep_back(read_tales(order.text))
        self.stem = order.text.stem
        self.common: dict[str, int | str] = {"text": _digest(order.text), "window": order.window, "seed": order.seed}
        if order.target:
            self.tokenizer = files.read_model(order.target)[1]
        else:
            self.tokenizer = self._tokenizer()
        self.stream = stream_of(self.encode, self.tales, order.window)
        self.held = stream_of(self.encode, held, order.window)
        self.validation = even_windows(self.held, order.window, 24)
        vocabulary = self.tokenizer.get_vocab_size()
        print(f"{len(self.tales)} + {len(held)} tales, {len(self.stream)} tokens, vocabulary {vocabulary}", flush=True)

    def run(self) -> None:
        """Carry out the stages. Raises InputError, OSError, and StoppedError where it is to stop."""
        self.order.out_dir.mkdir(parents=True, exist_ok=True)
        stages = {
            "target": self._target,
            "outputs": self._outputs,
            "draft": self._draft,
            "second-draft": self._second_draft,
            "head": self._head,
        }
        for stage, carry_out in stages.items():
            if stage in self.order.stages:
                carry_out()
        if "report" in self.order.stages:
            self._report()

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, control tokens included."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def _tokenizer(self) -> Tokenizer:
        path = self.work.path("tokenizer.json")
        if self.work.begin("tokenizer", {"text": self.common["text"]}):
            train_tokenizer(self.tales).save(str(path))
            self.work.finish("tokenizer")
        return Tokenizer.from_file(str(path))

    def _target(self) -> None:
        steps = self.order.target_steps
        if self.order.target or not self.work.begin("target", {**self.common, "steps": steps}):
            return
        torch.manual_seed(self.order.seed)
        model = Model.new(TARGET(vocabulary=self.tokenizer.get_vocab_size()))
        induction.install(model)
        batch_of = Batches(self.stream, Tasks(self.tales), self.encode, self.order.window, MIXTURE, self.order.seed)

        def loss(step: int) -> Tensor:
            return _cross_entropy(model, batch_of(step), self.order.bfloat16)

        def validate() -> float:
            return float(_cross_entropy(model, self.validation))

        plan = Plan(name="target", steps=steps, rate=2e-3, patience=None, seed=self.order.seed)
        fit(plan, model.weights, loss, validate, self.work.path("target.pt"), self.stop)
        self._write(model, "target")

    def _outputs(self) -> None:
        if not self.work.begin("outputs", self._lessons()):
            return
        target = files.read_model(self._target_path())[0]
        tasks = Tasks(self.tales) if TURN in self.tokenizer.get_vocab() else None
        draw = outputs.prompts_for(self.stream, tasks, self.encode)
        order = self.order
        outputs.collect(target, self.stream, draw, order.window, order.samples, order.seed, self.work, self.stop)
        self.work.finish("outputs")

    def _draft(self) -> None:
        steps = self.order.draft_steps
        if self.order.draft or not self.work.begin("draft", {**self._lessons(), "steps": steps}):
            return
        own, text, held = (distillation.Set.even(lessons) for lessons in outputs.load(self.work))
        torch.manual_seed(self.order.seed)
        model = Model.new(DRAFT(vocabulary=self.tokenizer.get_vocab_size()))
        induction.install(model)
        loss, validate = distillation.losses(model, own, text, held, self.order.seed)
        plan = Plan(name="draft", steps=steps, rate=3e-3, patience=600, seed=self.order.seed)
        fit(plan, model.weights, loss, validate, self.work.path("draft.pt"), self.stop)
        self._write(model, "draft")

    def _second_draft(self) -> None:
        first_path = self.order.draft or self._path("draft")
        steps = self.order.second_draft_steps
        settings = {**self._lessons(), "steps": steps, "draft": _digest(first_path)}
        if not self.work.begin("second-draft", settings):
            return
        first = files.read_model(first_path)[0]
        own, text, held = (distillation.Set.boosted(lessons, first) for lessons in outputs.load(self.work))
        torch.manual_seed(self.order.seed)
        model = distillation.second_draft(first)
        loss, validate = distillation.losses(model, own, text, held, self.order.seed + 1)
        plan = Plan(name="second-draft", steps=steps, rate=1.5e-3, patience=600, seed=self.order.seed)
        fit(plan, model.weights, loss, validate, self.work.path("second-draft.pt"), self.stop)
        self._write(model, "draft-2", "second-draft")

    def _head(self) -> None:
        steps = self.order.head_steps
        if not self.work.begin("head", {**self._lessons(), "steps": steps}):
            return
        target = files.read_model(self._target_path())[0]
        torch.manual_seed(self.order.seed)
        head = eagle.Head.new(target)
        loss, validate = head.losses(target, *outputs.load(self.work), self.order.seed)
        plan = Plan(name="head", steps=steps, rate=1.5e-3, patience=400, seed=self.order.seed)
        fit(plan, head.weights, loss, validate, self.work.path("head.pt"), self.stop)
        files.write_head(head, target, self.tokenizer, self._path("eagle3"))
        print(f"wrote {self._path('eagle3')}", flush=True)
        self.work.finish("head")

    def _report(self) -> None:
        drafts = [self.order.draft or self._path("draft"), self._path("draft-2")]
        head = self._path("eagle3")
        models = report.read(
            self._target_path(), [path for path in drafts if path.exists()], head if head.exists() else None
        )
        with self.work.path("report.txt").open("w", encoding="utf-8") as file:
            for line in report.lines(models, self.held):
                print(line, flush=True)
                file.write(f"{line}\n")

    def _lessons(self) -> dict[str, int | str]:
        """The settings of the stages that learn from a target's own text."""
        return {**self.common, "samples": self.order.samples, "target": _digest(self._target_path())}

    def _target_path(self) -> Path:
        return self.order.target or self._path("target")

    def _path(self, role: str) -> Path:
        return self.order.out_dir / f"{self.stem}-{role}.gguf"

    def _write(self, model: Model, role: str, stage: str = "") -> None:
        files.write_model(model, self.tokenizer, self._path(role))
        print(f"wrote {self._path(role)}", flush=True)
        self.work.finish(stage or role)


def _cross_entropy(model: Model, windows: NDArray[np.int64], bfloat16: bool = False) -> Tensor:
    """In nats a token; windows are (n, window + 1)."""
    tokens = torch.from_numpy(windows)
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        scores = logits(model, tokens[:, :-1])
    return F.cross_entropy(scores.float().flatten(0, 1), tokens[:, 1:].flatten())


def _digest(path: Path) -> str:
    if not path.exists():
        raise InputError(f"{path} is missing: train it first, or name another file")
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]

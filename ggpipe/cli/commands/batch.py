"""`ggpipe batch`: answer a file of prompts, several at a time."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ggpipe.apis.batch_results import Results, TaskOutput
from ggpipe.apis.batch_tasks import Task, read_tasks
from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.embeddings import EmbeddingBody
from ggpipe.channel.client import ClientRequest, EngineClient, StartedRanks
from ggpipe.channel.events import RequestAccepted, RequestEnded, RequestRefused, TokenReady
from ggpipe.cli import INTERRUPTED
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import in_flags, show, warn
from ggpipe.config.engine import EngineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import as_prompt
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.display.format import counted, human_rate, human_seconds
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.progress import CountProgress
from ggpipe.errors import RunError, Setting, UsageError, Wording
from ggpipe.options.chat import ChatSettings
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import BatchSettings, DisplaySettings, EmbeddingSettings, ModelSettings, PromptSettings
from ggpipe.text.embeddings import chosen, normalized


def run(options: Options) -> int:
    """Answer the prompts that are not answered yet, or be one of the ranks. Returns the exit code."""
    config, own = engine_config(options), options[BatchSettings]

    @functools.cache
    def results() -> Results:
        options[ChatSettings].check_template()  # to find mistakes in the settings first
        sampling_config(options)
        tasks = read_tasks(own.input, own.format, options[ChatSettings].conversation)
        model = options[ModelSettings].target
        return Results(own.output, own.output_format, tasks, model.name if model is not None else "")

    def front_end(ranks: StartedRanks) -> int:
        with results() as found:
            return _Work(ranks, found, config, options).run(warnings_of(options))

    return run_command(config, options, front_end, prepare=results)


@dataclass(kw_only=True)
class _Flight:
    """A task that is being answered."""

    task: Task
    texts: list[TaskOutput | None]
    """Outputs, or embeddings; None for those that are not finished."""
    error: str = ""
    """Why one of them failed."""


class _Work:
    """Answers all tasks."""

    def __init__(self, ranks: StartedRanks, results: Results, config: EngineConfig, options: Options) -> None:
        self._ranks, self._results = ranks, results
        self._n_at_a_time = 2 * config.n_requests  # some wait in the head, to keep it busy
        self._sampling: SamplingOf = functools.partial(sampling_config, options)
        self._speculation: SpeculationConfig = speculation_config(options)
        self._chat = options[ChatSettings]
        self._n_predict = options[PromptSettings].n_predict
        self._color = options[DisplaySettings].color
        self._embedding = options[EmbeddingSettings]
        self._left = collections.deque(results.left)
        self._warned: set[Wording] = set()
        self._asks: collections.deque[tuple[_Flight, int, RequestSpec]] = collections.deque()
        """Requests that were not submitted yet, each with its task and the index of its output."""
        self._places: dict[int, tuple[_Flight, int, ClientRequest]] = {}
        """Requests in flight, by id."""
        self._is_stopped = False
        self._n_tokens = 0
        self._started_at = time.monotonic()

    def run(self, warnings: list[Wording]) -> int:
        """Answer all tasks, and return the exit code. After an error, the answers so far are written."""
        results, n_before = self._results, self._results.n_answered
        n_all = n_before + len(self._left)
        if n_before:
            show(f"{n_before} of {n_all} prompts are already answered")
        with CountProgress(open_terminal(self._color), n_all) as progress:
            while self._left and self._left[0].body is None:  # invalid tasks come first
                self._fail(self._left.popleft())
            if self._left:
                progress.show(n_before, "loading")
                engine = self._ranks.load()
                for warning in (*warnings, *engine.warnings):
                    warn(warning)
                self._started_at = time.monotonic()

                def on_change() -> None:
                    progress.show(results.n_answered + results.n_failed, human_rate(self._rate))

                self._serve(engine, on_change)
        seconds = time.monotonic() - self._started_at
        n_new = results.n_answered - n_before
        if n_before < n_all:
            show(
                f"{counted(n_new, 'prompt')} answered, {counted(self._n_tokens, 'token')} in {human_seconds(seconds)}"
                + (f", {human_rate(self._rate)}" if self._n_tokens else "")
            )
        if self._left or self._places or self._is_stopped:
            n_left = n_all - results.n_answered - results.n_failed
            show(f"interrupted: {n_left} of {n_all} prompts are left. Run the same command again to continue")
            return INTERRUPTED
        if results.n_failed:
            show(f"{results.n_failed} of {n_all} prompts got an error instead of an answer")
            return RunError.exit_code
        return 0

    @property
    def _rate(self) -> float:
        return self._n_tokens / max(time.monotonic() - self._started_at, 1e-9)

    def _serve(self, engine: EngineClient, on_change: Callable[[], None]) -> None:
        while ((self._left or self._asks) and not self._is_stopped) or self._places:
            self._is_stopped = self._is_stopped or self._ranks.is_ending()
            while (self._left or self._asks) and not self._is_stopped and len(self._places) < self._n_at_a_time:
                if self._asks:
                    flight, index, spec = self._asks.popleft()
                    request = engine.submit(spec)
                    self._places[request.id] = (flight, index, request)
                else:
                    self._begin(engine, self._left.popleft())
            for event in engine.step():
                match event:
                    case TokenReady():
                        self._n_tokens += 1
                    case RequestAccepted(warnings=warnings):
                        for warning in warnings:
                            if warning not in self._warned:
                                self._warned.add(warning)
                                warn(warning)
                    case RequestEnded() | RequestRefused():
                        self._end(*self._places.pop(event.request))
            on_change()

    def _begin(self, engine: EngineClient, task: Task) -> None:
        """Make the requests of a task. Mistakes become errors in the output."""
        try:
            match task.body:
                case None:
                    self._fail(task)
                    return
                case EmbeddingBody() as body:
                    specs = self._embeddings(engine, body)
                case body:
                    usual = RequestSpec(prompt=b"", n_predict=self._n_predict, speculation=self._speculation)
                    sampling = body.sampling(self._sampling(engine.sampling))
                    specs = body.requests(usual, sampling, self._chat.completed)
        except UsageError as e:
            self._results.fail(task, in_flags(e))
            return
        flight = _Flight(task=task, texts=[None] * len(specs))
        self._asks.extend((flight, i, spec) for i, spec in enumerate(specs))

    def _embeddings(self, engine: EngineClient, body: EmbeddingBody) -> list[RequestSpec]:
        body.check(engine.model.n_embd)
        pooling = chosen(self._embedding.pooling, engine.model.pooling)
        if pooling == "none":
            raise UsageError(
                "the output has no room for a vector per token: set ", Setting("pooling"), " to mean, cls or last"
            )
        return [RequestSpec(prompt=as_prompt(one), pooling=pooling) for one in body.prompts]

    def _end(self, flight: _Flight, index: int, request: ClientRequest) -> None:
        body, vector = flight.task.body, None
        if request.error is not None:
            flight.error = in_flags(request.error)
        elif request.stats.finish is Finish.STOPPED:
            self._is_stopped = True
        elif isinstance(body, EmbeddingBody) and request.ended is not None:
            numbers = np.frombuffer(request.ended.embedding[0], np.float32)
            vector = normalized(numbers, body.norm(self._embedding.embd_normalize))
        flight.texts[index] = TaskOutput(
            prompt=index // body.n_choices if isinstance(body, GenerationBody) else index, stats=request.stats,
            prompt_tokens=request.prompt, tokens=request.tokens, rest=request.rest, marks=request.answer_format,
            key=f"{flight.task.id}/{index}", vector=vector,
        )  # fmt: skip
        texts = [text for text in flight.texts if text is not None]
        if len(texts) < len(flight.texts):
            return
        if flight.error:
            self._results.fail(flight.task, flight.error)
        elif any(text.stats.finish is Finish.STOPPED for text in texts):
            self._left.append(flight.task)
        else:
            self._results.answer(flight.task, texts)

    def _fail(self, task: Task) -> None:
        self._results.fail(task, task.error)

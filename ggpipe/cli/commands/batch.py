"""`ggpipe batch`: answer a file of prompts, several at a time."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ggpipe.batch.bodies import Answered, Ask
from ggpipe.batch.results import Results
from ggpipe.batch.tasks import Task, read_tasks
from ggpipe.chat.conversation import Conversation
from ggpipe.chat.reasoning import ReasoningFormat
from ggpipe.cli import INTERRUPTED
from ggpipe.cli.launching import run_command
from ggpipe.cli.messages import in_flags, show, warn
from ggpipe.config import EngineConfig, SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.display.format import human_rate, human_seconds
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.progress import BatchProgress
from ggpipe.errors import RunError, UsageError
from ggpipe.options.chat import Chat
from ggpipe.options.engine_config import engine_config, speculation_config, warnings_of
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import BatchSettings, Models, Prompt
from ggpipe.runtime.channel.client import ClientRequest, EngineClient, RequestEnded, StartedRanks, TokenReady


def run(options: Options) -> int:
    """Load, answer what is not answered yet, and write it; or be one of the ranks. The exit code."""
    config, own = engine_config(options), options[BatchSettings]

    @functools.cache
    def results() -> Results:
        options[Chat].conversation("")  # mistakes in its settings are found before anything is read
        sampling_config(options)
        tasks = read_tasks(own.input, own.format, options[Chat].conversation)
        model = options[Models].target
        return Results(own.output, own.output_format, tasks, model.name if model is not None else "")

    def front_end(ranks: StartedRanks) -> int:
        with results() as found:
            return _Work(ranks, found, config, options).run(warnings_of(options))

    return run_command(config, options, front_end, prepare=results)


@dataclass(kw_only=True)
class _Flight:
    """A task whose answer is being written."""

    task: Task
    marks: ReasoningFormat | None


@dataclass
class _Tally:
    """What this job has done."""

    n_tokens: int = 0
    began: float = field(default_factory=time.monotonic)

    @property
    def rate(self) -> float:
        """Tokens a second, of all requests together."""
        return self.n_tokens / max(time.monotonic() - self.began, 1e-9)


class _Work:
    """The tasks, from the file of prompts to the file of answers."""

    def __init__(self, ranks: StartedRanks, results: Results, config: EngineConfig, options: Options) -> None:
        self._ranks, self._results = ranks, results
        self._n_at_a_time = 2 * config.n_requests  # some wait in the head, so that it is never idle
        self._sampling: SamplingOf = functools.partial(sampling_config, options)
        self._speculation: SpeculationConfig = speculation_config(options)
        self._n_predict = options[Prompt].n_predict
        self._color = options[BatchSettings].color
        self._left = collections.deque(results.left)
        self._flights: dict[int, _Flight] = {}
        self._is_stopped = False

    def run(self, warnings: list[str]) -> int:
        """The exit code. Raises what loading and serving raise; what is answered by then is written."""
        results, n_before, tally = self._results, self._results.n_answered, _Tally()
        n_all = n_before + len(self._left)
        if n_before:
            show(f"{n_before} of {n_all} prompts are answered already")
        with BatchProgress(open_terminal(self._color), n_all) as progress:
            while self._left and self._left[0].ask is None:  # they come first: they have no key
                self._fail(self._left.popleft())
            if self._left:
                engine = self._ranks.load()
                for warning in (*warnings, *engine.warnings):
                    warn(warning)
                tally = _Tally()
                self._serve(engine, lambda: progress.show(results.n_answered + results.n_failed, tally.rate), tally)
        seconds = time.monotonic() - tally.began
        n_new = results.n_answered - n_before
        show(
            f"{n_new} prompts answered, {tally.n_tokens} tokens in {human_seconds(seconds)}"
            + (f", {human_rate(tally.rate)}" if tally.n_tokens else "")
        )
        if self._left or self._flights or self._is_stopped:
            n_left = n_all - results.n_answered - results.n_failed
            show(f"interrupted, {n_left} of {n_all} prompts are left: the same command goes on with them")
            return INTERRUPTED
        if results.n_failed:
            show(f"{results.n_failed} of {n_all} prompts have an error instead of an answer")
            return RunError.exit_code
        return 0

    def _serve(self, engine: EngineClient, on_change: Callable[[], None], tally: _Tally) -> None:
        while (self._left and not self._is_stopped) or self._flights:
            self._is_stopped = self._is_stopped or self._ranks.is_ending()
            while self._left and not self._is_stopped and len(self._flights) < self._n_at_a_time:
                self._submit(engine, self._left.popleft())
            for event in engine.step():
                match event:
                    case TokenReady():
                        tally.n_tokens += 1
                    case RequestEnded(request):
                        self._end(request, self._flights.pop(request.id))
            on_change()

    def _submit(self, engine: EngineClient, task: Task) -> None:
        ask = task.ask
        if ask is None:
            self._fail(task)
            return
        try:
            prompt, marks = _tokens(engine, ask)
            engine.check_prompt(prompt)
            sampling = ask.drawn(self._sampling(engine.sampling))
        except UsageError as e:
            self._results.fail(task, in_flags(str(e)))
            return
        n_predict = self._n_predict if ask.n_predict is None else ask.n_predict
        request = engine.submit(prompt, sampling, n_predict, self._speculation)
        self._flights[request.id] = _Flight(task=task, marks=marks)

    def _end(self, request: ClientRequest, flight: _Flight) -> None:
        if request.error is not None:
            self._results.fail(flight.task, in_flags(str(request.error)))
        elif request.stats.finish is Finish.STOPPED:
            self._is_stopped = True
            self._left.append(flight.task)
        else:
            answered = Answered(
                stats=request.stats, prompt=request.prompt, tokens=request.tokens, rest=request.rest, marks=flight.marks
            )  # fmt: skip
            self._results.answer(flight.task, answered)

    def _fail(self, task: Task) -> None:
        self._results.fail(task, task.error)


def _tokens(engine: EngineClient, ask: Ask) -> tuple[tuple[int, ...], ReasoningFormat | None]:
    match ask.prompt:
        case str() as text:
            return engine.tokenize(text), None
        case Conversation() as conversation:
            chat = engine.tokenize_chat(conversation)
            return chat.tokens, chat.reasoning
        case tokens:
            return tokens, None

"""One answer: a conversation goes to the engine, and what the model writes is shown as it comes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from ggpipe.channel.client import EngineClient, StartedRanks
from ggpipe.cli.messages import warn
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.display.format import counted, human_rate, human_seconds
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.markdown import MarkdownStream
from ggpipe.display.live.panel import origin_style
from ggpipe.display.live.stream import TextStream
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.stdout import Stdout
from ggpipe.errors import PromptTooLong, Setting, UsageError, Wording
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.reasoning import Piece, ReasoningParser


@dataclass(kw_only=True)
class ModelReply:
    """What the model has written."""

    text: str = ""
    reasoning: str = ""
    stats: RequestStats = field(default_factory=RequestStats)

    def add(self, piece: Piece) -> None:
        """What comes next."""
        if piece.is_reasoning:
            self.reasoning += piece.text
        else:
            self.text += piece.text

    @property
    def is_empty(self) -> bool:
        """Nothing has come."""
        return not (self.text or self.reasoning)

    def line(self) -> str:
        """Its figures in one line."""
        stats = self.stats
        cached = stats.counters.cached_tokens
        prompt = f"prompt {stats.n_prompt}" + (f", {cached} cached" if cached else "")
        answer = counted(stats.n_generated, "token")
        if stats.decode_tps is not None:
            answer += f", {human_rate(stats.decode_tps)}"
        first = f"TTFT {human_seconds(stats.ttft_s)}"
        ends = {Finish.STOPPED: ["stopped"], Finish.LENGTH: ["length reached"]}
        return " · ".join([answer, prompt, first, *(ends.get(stats.finish, ()) if stats.finish else ())])


class Answerer:
    """Has conversations answered, one at a time. Belongs to the main thread."""

    def __init__(
        self,
        ranks: StartedRanks,
        engine: EngineClient,
        terminal: Terminal | None,
        stdout: Stdout | None,
        markdown: bool,
        n_predict: int,
        speculation: SpeculationConfig,
    ) -> None:
        """`stdout`: where answers go besides the terminal, without reasoning and as they are. `markdown`: they are
        laid out on the terminal."""
        self.ranks, self.engine = ranks, engine
        self._stdout = stdout
        self._n_predict, self._speculation = n_predict, speculation
        self._display: LiveDisplay | None = None
        if terminal is not None:
            console = terminal.console
            stream = (lambda: MarkdownStream(console)) if markdown else TextStream
            self._display = LiveDisplay(terminal, ranks.ranks, lambda: ranks.is_loading, stream=stream)

    def answer(self, conversation: Conversation, sampling: SamplingConfig, reply: ModelReply) -> None:
        """Fill in the reply. Raises UsageError where the model cannot take the conversation, RunError when ranks break
        or stdout cannot be written; the reply has what came before."""
        engine = self.engine
        self.ranks.stopping = False  # a Ctrl-C that came after the last answer
        spec = RequestSpec(
            prompt=conversation, sampling=sampling, n_predict=self._n_predict, speculation=self._speculation
        )
        try:
            request = engine.begin(spec, reply.stats)
        except PromptTooLong as e:
            raise UsageError(
                f"the conversation has {e.n_prompt} tokens and the context {e.n_ctx}: /clear begins a new one, "
                "/save keeps this one, and ",
                Setting("n_ctx"),
                " makes room for longer ones",
            ) from e
        marks = request.answer_format
        assert marks is not None  # it is a conversation
        parser = ReasoningParser(marks.reasoning)
        with self._shown(reply):
            for token in engine.tokens(request):
                for piece in parser.feed(marks.text_of(token.id, token.text)):
                    self._write(piece, reply, origin_style(token.drafted))
            for piece in [*parser.feed(request.rest), *parser.finish()]:
                self._write(piece, reply, None)
            if reply.text and not reply.text.endswith("\n"):
                self._to_stdout("\n")
        if reply.stats.finish is Finish.CONTEXT_FULL:
            warn(
                Wording(
                    f"the context of {engine.n_ctx} tokens is full, and the answer is cut off: /clear begins a new "
                    "conversation, /save keeps this one, and ",
                    Setting("n_ctx"),
                    " makes room for longer ones",
                )
            )

    def _write(self, piece: Piece, reply: ModelReply, style: str | None) -> None:
        reply.add(piece)
        if self._display is not None:
            if piece.is_reasoning:
                self._display.aside(piece.text)
            else:
                self._display.text(piece.text, style)
        if not piece.is_reasoning:
            self._to_stdout(piece.text)

    def _to_stdout(self, text: str) -> None:
        if self._stdout is not None and not self._stdout.write(text, self.ranks.is_ending):
            self.ranks.stop()  # the reader has enough

    @contextlib.contextmanager
    def _shown(self, reply: ModelReply) -> Iterator[None]:
        if self._display is not None:
            self._display.request(reply.stats)
        try:
            yield
        finally:
            if self._display is not None:
                self._display.stop()

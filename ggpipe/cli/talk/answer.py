"""Generates an answer: sends a conversation to the engine, and shows the answer as it comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.style import Style

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
from ggpipe.display.live.stream import TextStream
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.origins import origin_style
from ggpipe.display.stdout import Stdout
from ggpipe.errors import PromptTooLong, Setting, UsageError, Wording
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.reasoning import Piece, ReasoningParser


@dataclass(kw_only=True)
class ModelReply:
    """The model's answer."""

    text: str = ""
    reasoning: str = ""
    stats: RequestStats = field(default_factory=RequestStats)

    def add(self, piece: Piece) -> None:
        """Append a piece."""
        if piece.is_reasoning:
            self.reasoning += piece.text
        else:
            self.text += piece.text

    @property
    def is_empty(self) -> bool:
        """Whether nothing was generated."""
        return not (self.text or self.reasoning)

    def line(self) -> str:
        """The answer's figures, as one line."""
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
    """Generates answers, one at a time. Belongs to the main thread."""

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
        """`stdout`: where to write answers in addition to the terminal, unformatted and without reasoning. `markdown`:
        format them on the terminal."""
        self.ranks, self.engine = ranks, engine
        self._stdout = stdout
        self._n_predict, self._speculation = n_predict, speculation
        stream = (lambda: MarkdownStream(terminal.console)) if markdown and terminal is not None else TextStream
        self._display = LiveDisplay(terminal, ranks.ranks, lambda: ranks.is_loading, stream=stream)

    def answer(self, conversation: Conversation, sampling: SamplingConfig, reply: ModelReply) -> None:
        """Generate the reply, and add to `reply` as it comes. Raises UsageError if the conversation is too long or
        invalid, and RunError if ranks fail or stdout cannot be written."""
        engine = self.engine
        self.ranks.stopping = False  # forget a Ctrl-C after the last answer
        spec = RequestSpec(
            prompt=conversation, sampling=sampling, n_predict=self._n_predict, speculation=self._speculation
        )
        try:
            request = engine.begin(spec, reply.stats)
        except PromptTooLong as e:
            raise UsageError(
                f"the conversation has {e.n_prompt} tokens, but the context only {e.n_ctx}: start a new conversation "
                "with /clear (/save keeps this one), or raise ",
                Setting("n_ctx"),
            ) from e
        marks = request.answer_format
        assert marks is not None  # it is a conversation
        parser = ReasoningParser(marks.reasoning)
        with self._display as display:
            display.request(reply.stats)
            for token in engine.tokens(request):
                for piece in parser.feed(marks.text_of(token.id, token.text)):
                    self._write(piece, reply, origin_style(token.drafters))
            for piece in [*parser.feed(request.rest), *parser.finish()]:
                self._write(piece, reply, None)
            if reply.text and not reply.text.endswith("\n"):
                self._to_stdout("\n")
        if reply.stats.finish is Finish.CONTEXT_FULL:
            warn(
                Wording(
                    f"the context of {engine.n_ctx} tokens is full, so the answer is cut off: start a new conversation "
                    "with /clear (/save keeps this one), or raise ",
                    Setting("n_ctx"),
                )
            )

    def _write(self, piece: Piece, reply: ModelReply, style: Style | None) -> None:
        reply.add(piece)
        if piece.is_reasoning:
            self._display.aside(piece.text)
        else:
            self._display.text(piece.text, style)
            self._to_stdout(piece.text)

    def _to_stdout(self, text: str) -> None:
        if self._stdout is not None and not self._stdout.write(text, self.ranks.is_ending):
            self.ranks.stop()  # the reader has left
